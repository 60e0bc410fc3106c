"""lin-attn figures: the figures of the RoFormer paper that need no training, as pictures and data."""

import sys
from pathlib import Path

from models.cli.arguments import ArgumentParser


def parser() -> ArgumentParser:
    """The command's arguments."""
    parser = ArgumentParser(
        prog="lin-attn figures",
        description="Draw the figures of the RoFormer paper that need no training: rope-decay, the relative upper "
        "bound of RoPE's inner product against distance, and sinusoidal, the table of sinusoidal encodings. Each as "
        ".png and as .csv.",
        epilog="lin-attn figures --out runs/figures",
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/figures"), help="folder for what comes out (default: %(default)s)")
    add("--head-dim", type=int, default=128, help="of rope-decay: the rotated dims (default: %(default)s)")
    add("--base", type=float, default=10000.0, help="of rope-decay's wavelengths (default: %(default)g)")
    add("--distances", type=int, default=257, help="of rope-decay: how many, from 0 on (default: %(default)s)")
    add("--d-model", type=int, default=128, help="of sinusoidal: entries of an encoding (default: %(default)s)")
    add("--positions", type=int, default=128, help="of sinusoidal: how many, from 0 on (default: %(default)s)")
    return parser


def main(command: str, arguments: list[str]) -> None:
    """Runs `lin-attn figures ARGUMENTS…`."""
    options = parser().parse_args(arguments)
    from models.figures import rope_decay, sinusoidal_table

    options.out.mkdir(parents=True, exist_ok=True)
    written = rope_decay(options.out, head_dim=options.head_dim, base=options.base, distances=options.distances)
    written += sinusoidal_table(options.out, d_model=options.d_model, positions=options.positions)
    sys.stdout.writelines(f"{path}\n" for path in written)
