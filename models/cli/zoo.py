"""lin-attn zoo: the checkpoints that come with the package, and what each reaches."""

import json
import sys
from typing import Any

from models.cli.arguments import ArgumentParser
from models.cli.tables import aligned

LENGTHS = (512, 2048, 8192)


def parser() -> ArgumentParser:
    """The command's arguments."""
    parser = ArgumentParser(
        prog="lin-attn zoo",
        description="List the checkpoints that come with lin-attn, or print the model card of one. Bits per byte are "
        "those of the held-out files, in blocks of each length; the models were trained at the length under context.",
    )
    parser.add_argument("name", nargs="?", help="print the model card of this one")
    parser.add_argument("--json", action="store_true", help="the list as JSON, with all figures that are known")
    return parser


def main(command: str, arguments: list[str]) -> None:
    """Runs `lin-attn zoo ARGUMENTS…`."""
    options = parser().parse_args(arguments)
    from models.pretrained import available
    from models.pretrained.folder import CARD
    from models.pretrained.loading import ZOO

    if options.name is not None:
        if options.json:
            raise ValueError("--json is given with a name, whose card is text; wanted one of the two")
        if options.name not in available():
            raise ValueError(f"name is {options.name!r}; wanted one of {', '.join(available())}")
        sys.stdout.write((ZOO / options.name / CARD).read_text(encoding="utf-8"))
        return
    entries = [entry(name) for name in available()]
    if options.json:
        sys.stdout.write(json.dumps(entries, indent=1) + "\n")
    else:
        sys.stdout.write(table(entries))


def entry(name: str) -> dict[str, Any]:
    """What is known of a shipped checkpoint: sizes are read off the model, figures off its config.json."""
    from models import CausalLM, from_pretrained
    from models.pretrained import read_config
    from models.pretrained.card import position_of
    from models.pretrained.loading import ZOO
    from models.state_size import state_size

    config, model = read_config(ZOO / name), from_pretrained(name)
    summary = dict(config["summary"])
    found: dict[str, Any] = {
        "name": name,
        "class": config["class"],
        "attention": model.network_config.attention,
        "position": position_of(model.network_config),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    if isinstance(model, CausalLM):
        size = state_size(model)
        found |= {"state_bytes": size.fixed, "state_bytes_per_token": size.per_token}
    return {**found, **summary.pop("metrics", {}), **summary}


def table(entries: list[dict[str, Any]]) -> str:
    """The list for people; a dash where a figure does not exist for a model."""
    header = ["name", "attention", "positions", "parameters", "context"]
    header += [f"bits/byte at {length:,}" for length in LENGTHS] + ["state", "tokens/s"]
    rows = [header]
    for one in entries:
        row = [one["name"], one["attention"], one["position"], f"{one['parameters']:,}", _number(one.get("context"))]
        row += [_number(one.get(f"bits_per_byte_at_{length}"), ".3f") for length in LENGTHS]
        row += [_state(one), _number(one.get("decode_tokens_per_second"))]
        rows.append(row)
    return "\n".join(aligned(rows, left=3)) + "\n"


def _number(value: float | None, style: str = ",.0f") -> str:
    return "–" if value is None else format(value, style)


def _state(one: dict[str, Any]) -> str:
    if "state_bytes" not in one:
        return "–"
    per_token = one["state_bytes_per_token"]
    return f"{one['state_bytes']:,} B" if not per_token else f"{per_token:,} B a token"
