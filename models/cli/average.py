"""lin-attn average: the mean of several checkpoints' weights, as a checkpoint."""

import sys
from pathlib import Path

from models.cli.arguments import ArgumentParser


def parser() -> ArgumentParser:
    """The command's arguments."""
    parser = ArgumentParser(
        prog="lin-attn average",
        description="Average the weights of checkpoints of one run, such as its last 5 (Vaswani et al. 2017). What "
        "comes out is for lin-attn validate, test and predict.",
        epilog="lin-attn average runs/translation/version_0/checkpoints --last 5 --out averaged.ckpt",
    )
    parser.add_argument("checkpoints", nargs="+", type=Path, help=".ckpt files, or with --last one folder of them")
    parser.add_argument("--last", type=int, help="average the checkpoints of the folder with the greatest steps")
    parser.add_argument("--out", type=Path, required=True, help="the .ckpt file to write")
    return parser


def main(command: str, arguments: list[str]) -> None:
    """Runs `lin-attn average ARGUMENTS…`."""
    options = parser().parse_args(arguments)
    import torch

    from models.averaging import average_checkpoints, last_checkpoints
    from models.checkpoint_io import write_atomically

    paths = options.checkpoints
    if options.last is not None:
        if len(paths) != 1 or not paths[0].is_dir():
            raise ValueError(f"--last is given with {', '.join(map(str, paths))}; wanted one folder of checkpoints")
        paths = last_checkpoints(paths[0], options.last)
    averaged = average_checkpoints(paths)
    # Not over itself: what is read is mapped, and the target may be one of the sources.
    write_atomically(options.out, lambda file: torch.save(averaged, file))
    sys.stdout.write(f"the mean of {len(paths)} checkpoints: {options.out}\n")
    sys.stdout.writelines(f"  {path}\n" for path in paths)
