"""lin-attn generate: continues a prompt, text appearing as it is drawn."""

import io
import sys

from models.cli.arguments import ArgumentParser


def parser() -> ArgumentParser:
    """The command's arguments."""
    from models.cli.opening import MODEL

    parser = ArgumentParser(
        prog="lin-attn generate",
        description="Continue a prompt. Memory does not grow with the text where the model's attention is linear.",
    )
    parser.add_argument("--model", "--checkpoint", dest="model", required=True, help=MODEL)
    parser.add_argument("--prompt", default="", help="text to continue; by default a new document is begun")
    parser.add_argument("--max-new-tokens", type=int, default=500, help="tokens to add at most (default: %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: %(default)s)"
    )
    parser.add_argument("--top-k", type=int, help="draw from the k likeliest tokens only")
    parser.add_argument("--top-p", type=float, help="draw from the likeliest tokens that together reach p only")
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        help="above 1, make tokens that came before less likely (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, help="of the draws; the same seed gives the same text")
    parser.add_argument("--stop", action="append", default=[], help="end before this text; may be given several times")
    parser.add_argument("--device", default="auto", help="cpu, cuda, … (default: the fastest there is)")
    return parser


def main(command: str, arguments: list[str]) -> None:
    """Runs `lin-attn generate ARGUMENTS…`."""
    options = parser().parse_args(arguments)
    if "" in options.stop:
        raise ValueError("--stop is empty; wanted a text")
    from models.cli.opening import open_model

    model = open_model(options.model, options.device)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal of few characters
    pieces = model.stream_text(
        options.prompt.encode("utf-8", "surrogateescape"),  # what the terminal gave, be it UTF-8 or not
        options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        repetition_penalty=options.repetition_penalty,
        stop=options.stop,
        seed=options.seed,
    )
    sys.stdout.write(options.prompt)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
