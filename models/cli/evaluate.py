"""lin-attn evaluate: loss, perplexity and bits per byte of a model on a text, at several lengths."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.cli.arguments import ArgumentParser
from models.cli.tables import aligned

if TYPE_CHECKING:
    from lin_attn.data import TextCorpus
    from models.causal_lm import CausalLM
    from models.evaluation import Figures, Reading

LENGTHS = (512, 2048, 8192)
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
# What the model and the lengths say already.
NOT_OF_THE_DATA = {
    "source", "block_length", "batch_size", "eval_batch_size", "tokenizer", "vocab_size", "special_tokens", "end_token",
    "seed", "num_workers",
}  # fmt: skip


def parser() -> ArgumentParser:
    """The command's arguments, but those that begin with --data."""
    from models.cli.opening import MODEL

    parser = ArgumentParser(
        prog="lin-attn evaluate",
        allow_abbrev=False,
        description="Loss (nats per token), perplexity and bits per byte of a language model on a text, at several "
        "lengths: in blocks, each begun anew, as lin-attn validate has it; in overlapping windows (--stride); or in "
        "blocks that go on from the state of those before (--carry-state). docs/using-models.md says which measures "
        "what.",
        epilog="Further options of the data are those of lin-attn fit, such as --data.split tail or --data.config_name "
        "NAME; the text is read with the model's own tokenizer.",
    )
    add = parser.add_argument
    add("--model", required=True, help=MODEL)
    add("--data", nargs="+", metavar="SOURCE", help="stdlib, a file, a folder, a glob or hub:OWNER/NAME; several are "
        "one text (default: stdlib)")  # fmt: skip
    add("-c", "--config", help="a configuration of fit whose data is taken, in place of --data")
    add("--split", default="validation", choices=("train", "validation", "test"), help="default: %(default)s")
    add("--lengths", type=int, nargs="+", default=LENGTHS, metavar="N", help="tokens a block (default: 512 2048 8192)")
    add("--stride", type=int, help="let windows advance by so many tokens and count the last so many of each")
    add("--carry-state", action="store_true", help="begin each block with the state after the one before")
    add("--context", type=int, help="with --carry-state, begin anew after so many tokens; needed with softmax, whose "
        "state grows with every token")  # fmt: skip
    add("--max-tokens", type=int, help="evaluate on the first so many tokens only")
    add("--batch-tokens", type=int, help="tokens in a batch of blocks (default: 16384); it changes no figure")
    add("--precision", choices=PRECISIONS, help="default: as lin-attn validate, bf16-mixed where that is fast")
    add("--device", default="auto", help="cpu, cuda, … (default: the fastest there is)")
    add("--json", type=Path, metavar="FILE", help="write the figures and what they are of to a file")
    add("--progress", action="store_true", help="show the progress bar also where standard error is no terminal")
    return parser


def main(command: str, arguments: list[str]) -> None:
    """Runs `lin-attn evaluate ARGUMENTS…`."""
    options, rest = parser().parse_known_args(arguments)
    from models.cli.opening import open_model
    from models.evaluation import check_reading
    from models.hardware import default_precision
    from models.padding import tokenizer_of

    readings = planned(options)
    if options.json is not None and (options.json.is_dir() or not options.json.parent.is_dir()):
        raise ValueError(f"--json is {options.json}; wanted a file in a folder that is there")
    data = corpus(options, rest)
    model = open_model(options.model, options.device)
    for reading in readings:
        check_reading(model, reading)
    options.precision = options.precision or default_precision()
    if options.precision == "bf16-true":
        model.bfloat16()
    data.read_with(tokenizer_of(model))
    results = evaluate_all(model, data, readings, options)
    told = described(model, data, options)
    sys.stdout.write(table(told, results))
    if options.json is not None:
        figures = [result._asdict() for result in results]
        options.json.write_text(json.dumps(told | {"results": figures}, indent=1) + "\n")


def planned(options: argparse.Namespace) -> list["Reading"]:
    """How the text is to be read, once a length.

    Raises:
        ValueError: for options that do not go together.
    """
    from models.evaluation import Reading

    if options.batch_tokens is not None and options.carry_state:
        raise ValueError("--batch-tokens is given with --carry-state, which goes block by block; leave it out")
    if len(set(options.lengths)) < len(options.lengths):
        raise ValueError(f"--lengths are {options.lengths}; wanted each once")
    return [Reading(n, options.stride, options.carry_state, options.context) for n in options.lengths]


def corpus(options: argparse.Namespace, rest: Sequence[str]) -> "TextCorpus":
    """The text, by --data or by a configuration, with the options that are named as --data.NAME."""
    from lin_attn.data import TextCorpus
    from models.cli.data import data_of
    from models.cli.training import Parser

    given: dict[str, Any] = {}
    if options.config is not None:
        if options.data is not None:
            raise ValueError("--data and --config are both given; wanted one")
        data = data_of(options.config)
        if data.get("class_path", "lin_attn.data.TextCorpus").rpartition(".")[2] != "TextCorpus":
            raise ValueError(f"{options.config} has data of {data['class_path']}; wanted lin_attn.data.TextCorpus")
        given = data.get("init_args") or {}
    source = options.data or given.get("source", "stdlib")
    parser = Parser(prog="lin-attn evaluate", default_env=False)
    parser.add_class_arguments(TextCorpus, "data", skip=NOT_OF_THE_DATA)
    parser.set_defaults({f"data.{name}": value for name, value in given.items() if name not in NOT_OF_THE_DATA})
    parsed = parser.parse_args(list(rest))
    return TextCorpus(source, **parsed.data.as_dict())


def evaluate_all(
    model: "CausalLM", data: "TextCorpus", readings: list["Reading"], options: argparse.Namespace
) -> list["Figures"]:
    """Evaluates at each length, with a progress bar over all of them on standard error."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    from models.evaluation import BATCH_TOKENS, evaluate

    store = data.stores[options.split]
    if len(store) < 2:
        raise ValueError(f"there is no {options.split} text; wanted a source that has some, or another --split")
    total = min(len(store) - 1, options.max_tokens or len(store)) * len(readings)
    results = []
    with tqdm(total=total, unit=" tokens", unit_scale=True, disable=False if options.progress else None) as bar:
        for reading in readings:
            bar.set_description_str(f"length {reading.length}")
            results.append(
                evaluate(
                    model,
                    store,
                    reading,
                    max_tokens=options.max_tokens,
                    batch_tokens=BATCH_TOKENS if options.batch_tokens is None else options.batch_tokens,
                    precision=options.precision,
                    progress=bar.update,
                )
            )
    return results


def described(model: "CausalLM", data: "TextCorpus", options: argparse.Namespace) -> dict[str, Any]:
    """What the figures are of: plain values."""
    import torch

    import lin_attn

    store = data.stores[options.split]
    return {
        "model": options.model,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "attention": model.network_config.attention,
        "position": model.network_config.position,
        "data": data.hparams["source"],
        "split": options.split,
        "rule": data.corpus.meta["rule"],
        "documents": store.n_documents,
        "tokenizer": data.tokenizer.fingerprint,
        "carry_state": options.carry_state,
        "context": options.context,
        "stride": options.stride,
        "max_tokens": options.max_tokens,
        "precision": options.precision,
        "device": str(model.device),
        "torch": torch.__version__,
        "lin_attn": lin_attn.__version__,
    }


def table(told: dict[str, Any], results: Sequence["Figures"]) -> str:
    """The figures for people, after a line that says what they are of."""
    how = "blocks that begin anew"
    if told["stride"] is not None:
        how = f"windows that advance by {told['stride']}"
    if told["carry_state"]:
        anew = "" if told["context"] is None else f", begun anew every {told['context']} tokens"
        how = f"blocks with the state carried{anew}"
    data = told["data"] if isinstance(told["data"], str) else ", ".join(map(str, told["data"]))
    lines = [f"{told['model']} on {told['split']} of {data}, in {how}; {told['precision']} on {told['device']}", ""]
    names = ["length", "loss", "perplexity", "bits per byte", "tokens", "bytes", "tokens/s"]
    rows = [[*names, "state bytes"] if told["carry_state"] else names]
    for one in results:
        row = [f"{one.length:,}", f"{one.loss:.4f}", f"{one.perplexity:.3f}", f"{one.bits_per_byte:.4f}"]
        row += [f"{one.n_tokens:,}", f"{one.n_bytes:,}", f"{one.n_tokens / one.seconds:,.0f}"]
        rows.append(row if one.state_bytes is None else [*row, f"{one.state_bytes:,}"])
    return "\n".join([*lines, *aligned(rows)]) + "\n"
