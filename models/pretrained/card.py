"""The model card, README.md: what the model computes, what it learned from, what it reaches, how to load it.

What can be read off the model (equation, sizes, bytes of state) is; figures of its training come in as a summary, and
what the summary does not have, the card does not say.
"""

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import yaml  # type: ignore[import-untyped]

from lin_attn.data.tokenizer_files import plain_name
from models.state_size import state_size

if TYPE_CHECKING:
    from models.causal_lm import CausalLM
    from models.config import NetworkConfig
    from models.training import TrainedModel

# field → (its type, its line in the card)
SUMMARY: dict[str, tuple[type, str]] = {
    "description": (str, "what the model is for, in a sentence or two"),
    "data": (str, "trained on"),
    "steps": (int, "steps"),
    "tokens": (int, "tokens seen in training"),
    "bits_per_byte": (float, "validation bits per byte"),
    "metrics": (dict, "other figures by their names, numbers"),
    "decode_tokens_per_second": (float, "tokens a second when decoding, one sequence"),
    "hardware": (str, "measured on"),
    "command": (str, "the command that trained it"),
    "license": (str, "licence"),
}
TASKS = {"CausalLM": "text-generation", "MaskedLM": "fill-mask", "SequenceClassifier": "text-classification"}
TAGS = ["linear-attention", "rotary-position-embedding"]


def checked_summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A summary as plain values.

    Raises:
        ValueError: for a field that is unknown or of another type.
    """
    for name, value in summary.items():
        if name not in SUMMARY:
            raise ValueError(f"summary has the unknown field {name!r}; wanted some of {', '.join(SUMMARY)}")
        kind = SUMMARY[name][0]
        numbers = list(value.values()) if kind is dict and isinstance(value, Mapping) else [value]
        if kind is str:
            fits = isinstance(value, str) and bool(value.strip())
        else:
            fits = isinstance(value, Mapping) == (kind is dict) and all(_is_number(x, kind is int) for x in numbers)
        if not fits:
            wanted = {str: "a text", int: "an integer", float: "a finite number", dict: "finite numbers by name"}[kind]
            raise ValueError(f"summary's {name} is {value!r}; wanted {wanted}")
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in summary.items()}


def _is_number(value: Any, integer: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if integer else int | float):
        return False
    return math.isfinite(value)


def model_card(model: "TrainedModel", summary: Mapping[str, Any], stored: str, name: str) -> str:
    """The card of a model in Markdown, its facts for the hub on top.

    Args:
        model: whose card it is.
        summary: what is known of its training, checked.
        stored: dtype of the weights in the file.
        name: of the model.
    """
    kind = type(model).__name__
    front: dict[str, Any] = {"library_name": "lin-attn", "tags": [*TAGS]}
    front |= {"pipeline_tag": TASKS[kind]} if kind in TASKS else {}
    front |= {"license": summary["license"]} if "license" in summary else {}
    parts = [f"---\n{yaml.safe_dump(front, sort_keys=False)}---", f"# {name}"]
    if "description" in summary:
        parts.append(summary["description"].strip())
    parts += [
        f"A `{kind}` of lin-attn. Each head of its attention computes",
        f"$${equation(model)}$$",
        _rows(model, summary, stored),
    ]
    parts.append(f"```python\nfrom models import from_pretrained\n\nmodel = from_pretrained({json.dumps(name)})\n```")
    if "command" in summary:
        parts.append(f"It was trained by\n\n```sh\n{summary['command'].strip()}\n```")
    return "\n\n".join(parts) + "\n"


def equation(model: "TrainedModel") -> str:
    """What a head of a model's attention computes, in LaTeX."""
    config = model.network_config
    n = r"n \le m" if type(model).__name__ == "CausalLM" else "n"
    q, k = _weighed(config)
    if config.attention == "softmax":
        bias = " + b_{mn}" if config.position in ("shaw", "transformer_xl", "t5", "deberta", "alibi") else ""
        weight = rf"\exp\left({q}^\top {k} / \sqrt{{d}}{bias}\right)"
        return rf"\mathrm{{out}}_m = \frac{{\sum_{{{n}}} {weight}\, v_n}}{{\sum_{{{n}}} {weight}}}"
    above = rf"\sum_{{{n}}} ({q})^\top ({k})\, v_n"
    if not config.normalize:
        return rf"\mathrm{{out}}_m = {above}"
    below = rf"\sum_{{{n}}} {_still(config, 'q_m')}^\top {_still(config, 'k_n')}"
    return rf"\mathrm{{out}}_m = \frac{{{above}}}{{{below}}}"


def _weighed(config: "NetworkConfig") -> tuple[str, str]:
    """The two vectors whose product weighs a value."""
    if config.attention == "softmax":
        return ("(R_m q_m)", "(R_n k_n)") if config.position in ("rope", "xpos") else ("q_m", "k_n")
    turned = config.position in ("rope", "xpos") and config.rope == "after"
    q, k = _still(config, "q_m"), _still(config, "k_n")
    return (f"R_m {q}", f"R_n {k}") if turned else (q, k)


def _still(config: "NetworkConfig", vector: str) -> str:
    """φ of a vector, unrotated unless rotation comes before φ."""
    inner = f"R_{vector[-1]} {vector}" if config.rotates_features and config.rope == "before" else vector
    return rf"\varphi({inner})"


def _rows(model: "TrainedModel", summary: Mapping[str, Any], stored: str) -> str:
    config = model.network_config
    name = plain_name(model.tokenizer)
    rows = [
        ("attention", config.attention + (f", φ {config.feature_map}" if config.attention == "linear" else "")),
        ("positions", position_of(config)),
        ("parameters", f"{sum(parameter.numel() for parameter in model.parameters()):,}, stored in {stored}"),
        ("layers, width, heads", f"{config.n_layers}, {config.d_model}, {config.n_heads}"),
        ("vocabulary", f"{config.vocab_size:,}" + (f", {name}" if name else "")),
        ("state of one sequence", _state_bytes(model)),
    ]
    for field in ("data", "steps", "tokens", "bits_per_byte", "decode_tokens_per_second", "hardware", "license"):
        rows.append((SUMMARY[field][1], _figure(summary[field]) if field in summary else None))
    rows += [(str(name).replace("_", " "), _figure(value)) for name, value in summary.get("metrics", {}).items()]
    lines = "\n".join(f"| {name} | {value} |" for name, value in rows if value is not None)
    return f"| | |\n|---|---|\n{lines}"


def _figure(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else " ".join(str(value).split()).replace("|", r"\|")


def position_of(config: "NetworkConfig") -> str:
    """The position encoding in words."""
    return f"rope {config.rope} φ" if config.rotates_features else config.position


def _state_bytes(model: "TrainedModel") -> str | None:
    if type(model).__name__ != "CausalLM":  # the others carry none
        return None
    size = state_size(cast("CausalLM", model))
    return f"{size.per_token:,} bytes a token" if size.per_token else f"{size.fixed:,} bytes at any length"
