"""lin-attn generate: continues a prompt, text appearing as it is drawn."""

import argparse
import codecs
import io
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.causal_lm import CausalLM


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog="lin-attn generate",
        description="Continue a prompt. Memory does not grow with the text where the model's attention is linear.",
    )
    parser.add_argument(
        "--model",
        "--checkpoint",
        dest="model",
        required=True,
        help="a .ckpt file written by lin-attn fit, a folder of save_pretrained, the name of a checkpoint that comes "
        "with lin-attn, or OWNER/NAME of the Hugging Face hub",
    )
    parser.add_argument("--prompt", default="", help="text to continue; by default a new document is begun")
    parser.add_argument("--max-new-tokens", type=int, default=500, help="tokens to add at most (default: %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: %(default)s)"
    )
    parser.add_argument("--top-k", type=int, help="draw from the k likeliest tokens only")
    parser.add_argument("--top-p", type=float, help="draw from the likeliest tokens that together reach p only")
    parser.add_argument("--seed", type=int, help="of the draws; the same seed gives the same text")
    parser.add_argument("--stop", action="append", default=[], help="end before this text; may be given several times")
    parser.add_argument("--device", default="auto", help="cpu, cuda, … (default: the fastest there is)")
    return parser


def main(command: str, arguments: list[str]) -> None:
    """Runs `lin-attn generate ARGUMENTS…`."""
    options = parser().parse_args(arguments)
    if "" in options.stop:
        raise ValueError("--stop is empty; wanted a text")
    import torch

    from models import CausalLM, from_pretrained

    device = options.device
    if device == "auto":
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"--device is {device}, which this torch cannot use; `lin-attn env` lists what it can"
        ) from error
    model = from_pretrained(options.model, device=device, kind=CausalLM)
    if model.tokenizer is None:
        raise ValueError(f"--model is {options.model}, which has no tokenizer; wanted one that was trained on text")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal of few characters
    sys.stdout.write(options.prompt)
    for piece in until(decoded(model, options), options.stop):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def decoded(model: "CausalLM", options: argparse.Namespace) -> Iterator[str]:
    """The continuation's text, a piece a token; a character of several bytes comes when it is whole."""
    import torch

    assert model.tokenizer is not None
    end = model.tokenizer.end_id
    prompt = [end, *model.tokenizer.encode(options.prompt.encode("utf-8", "surrogateescape")).tolist()]
    text = codecs.getincrementaldecoder("utf-8")("replace")
    to_bytes = model.tokenizer.stream_decoder()
    for token in model.stream(
        torch.tensor([prompt], device=model.device),
        options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        stop_token=end,
        seed=options.seed,
    ):
        yield text.decode(to_bytes(int(token)))
    yield text.decode(b"", final=True)


def until(pieces: Iterable[str], stops: list[str]) -> Iterator[str]:
    """The pieces up to the first of the stop texts, which may be spread over several of them.

    What could be the beginning of a stop is held back until it is known.
    """
    held = ""
    for piece in pieces:
        held += piece
        found = [held.index(stop) for stop in stops if stop in held]
        if found:
            yield held[: min(found)]
            return
        keep = max((n for stop in stops for n in range(1, len(stop)) if held.endswith(stop[:n])), default=0)
        yield held[: len(held) - keep]
        held = held[len(held) - keep :]
    yield held
