"""Small tables of examples in files, and what reads a data module's loaders as several processes would."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")


def text(number: int) -> str:
    """Text of one to some ten words, another one for each number."""
    return " ".join([str(number), *(WORDS[(number * 3 + i) % 8] for i in range(1 + number * 7 % 11))])


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def pair_rows(n: int) -> list[dict[str, Any]]:
    return [{"a": text(i), "b": text(2 * i + 1), "label": i % 2} for i in range(n)]


def triple_rows(n: int) -> list[dict[str, Any]]:
    return [{"A": text(i), "B": f"b{i}", "C": f"c{i}", "label": "BC"[i % 2]} for i in range(n)]


def translation_rows(n: int) -> list[dict[str, Any]]:
    return [{"source": text(i), "target": text(i + 5).upper()} for i in range(n)]


def as_rank(module: Any, rank: int, world_size: int, *, fn: str = "fit") -> Any:
    """The module as it is in one process of several."""
    place = {"rank": rank, "num_replicas": world_size}
    module.trainer = SimpleNamespace(distributed_sampler_kwargs=place, state=SimpleNamespace(fn=fn))
    return module
