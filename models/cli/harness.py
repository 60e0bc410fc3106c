"""lin-attn lm-eval: a model on tasks of EleutherAI's lm-evaluation-harness."""

import json
import sys
from pathlib import Path

from models.cli.arguments import ArgumentParser


def parser() -> ArgumentParser:
    """The command's arguments."""
    from models.cli.opening import MODEL

    parser = ArgumentParser(
        prog="lin-attn lm-eval",
        description="Evaluate a model on tasks of EleutherAI's lm-evaluation-harness, which has to be installed: "
        "pip install 'lin-attn[lm-eval]'. Its own options are had in Python: docs/using-models.md.",
    )
    add = parser.add_argument
    add("--model", required=True, help=MODEL)
    add("--tasks", required=True, nargs="+", metavar="TASK", help="names of tasks, or YAML files")
    add("--include-path", help="a folder with further tasks")
    add("--num-fewshot", type=int, help="examples before each question (default: the task's)")
    add("--limit", type=int, metavar="N", help="only the first N questions of each task, to try it out")
    add("--batch-size", type=int, default=16, help="requests that are computed together (default: %(default)s)")
    add("--max-length", type=int, help="tokens that are seen at once (default: the network's limit, if it has one)")
    add("--device", default="auto", help="cpu, cuda, … (default: the fastest there is)")
    add("--json", type=Path, metavar="FILE", help="write the results to a file")
    return parser


def main(command: str, arguments: list[str]) -> None:
    """Runs `lin-attn lm-eval ARGUMENTS…`."""
    options = parser().parse_args(arguments)
    if options.json is not None and (options.json.is_dir() or not options.json.parent.is_dir()):
        raise ValueError(f"--json is {options.json}; wanted a file in a folder that is there")
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import handle_non_serializable, make_table
    except ImportError as error:
        raise ValueError(
            f"lm_eval cannot be loaded ({error}); wanted it installed: pip install 'lin-attn[lm-eval]'"
        ) from error
    from models.harness import LinAttnLM

    manager = TaskManager(include_path=options.include_path)
    unknown = [name for name in options.tasks if name not in manager.all_tasks and not Path(name).is_file()]
    if unknown:
        raise ValueError(
            f"--tasks has {', '.join(unknown)}, no task of lm_eval and no file; wanted names that "
            "`lm_eval ls tasks` lists, or --include-path with a folder of others"
        )
    model = LinAttnLM(options.model, options.batch_size, options.device, options.max_length)
    found = simple_evaluate(
        model=model,
        tasks=options.tasks,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        log_samples=False,
        task_manager=manager,
    )
    sys.stdout.write(make_table(found) + "\n")
    if found.get("groups"):
        sys.stdout.write(make_table(found, "groups") + "\n")
    if options.json is not None:
        told = {"model": options.model, **found}
        options.json.write_text(json.dumps(told, indent=1, default=handle_non_serializable, ensure_ascii=False) + "\n")
