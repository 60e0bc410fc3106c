"""lin-attn convert: a model from one folder to another, in our format or in that of transformers."""

import sys
import warnings

from models.cli.arguments import ArgumentParser


def parser() -> ArgumentParser:
    """The command's arguments."""
    parser = ArgumentParser(
        prog="lin-attn convert",
        description="Write a model as a folder that models.from_pretrained reads, or that transformers reads. What is "
        "not carried over is told; what cannot be honoured is refused by name.",
        epilog="lin-attn convert runs/debug/version_0/checkpoints/last.ckpt my-model",
    )
    parser.add_argument(
        "source",
        help="a .ckpt file written by lin-attn fit, a folder of save_pretrained or of transformers (RoFormer, BERT, "
        "Llama, Mistral, Qwen2), the name of a checkpoint that comes with lin-attn, or OWNER/NAME of the hub",
    )
    parser.add_argument("target", help="the folder to write, new or empty")
    parser.add_argument(
        "--to", choices=("lin-attn", "transformers"), default="lin-attn", help="the format (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", choices=("float64", "float32", "float16", "bfloat16"), help="of the weights in the target's file"
    )
    parser.add_argument("--revision", help="branch, tag or commit of a source on the hub")
    parser.add_argument("--overwrite", action="store_true", help="replace a target that holds nothing but a model")
    return parser


def main(command: str, arguments: list[str]) -> None:
    """Runs `lin-attn convert ARGUMENTS…`."""
    options = parser().parse_args(arguments)
    from models import from_pretrained
    from models.converters import write_transformers
    from models.pretrained.weights import DTYPES

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model = from_pretrained(options.source, revision=options.revision)
    notes = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    dtype = DTYPES[options.dtype] if options.dtype else None
    if options.to == "transformers":
        notes += write_transformers(model, options.target, dtype=dtype, overwrite=options.overwrite)
    else:
        model.save_pretrained(options.target, dtype=dtype, overwrite=options.overwrite)
    sys.stdout.writelines(f"note: {note}\n" for note in notes)
    sys.stdout.write(f"{options.target}: a {type(model).__name__} in the format of {options.to}\n")
