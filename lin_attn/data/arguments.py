"""Checks of what data modules take, before anything is read; those of `TextCorpus` and `StreamingCorpus`."""

from collections.abc import Mapping
from typing import Any

from lin_attn.data.hub import PREFIX
from lin_attn.data.sources import ENTRY_FIELDS

HUB_FIELDS = ("config_name", "data_dir", "revision", "train_split", "validation_split", "test_split")


class Need:
    """Checks of arguments, which raise ValueError.

    Args:
        given: the arguments by name.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given

    def __call__(self, name: str, fits: bool, wanted: str) -> None:
        """Raises unless the argument fits."""
        if not fits:
            raise ValueError(f"{name} must be {wanted}, got {self._given[name]!r}")

    def text(self, *names: str, optional: bool = False) -> None:
        """Raises unless each is a text with something in it."""
        for name in names:
            value = self._given[name]
            missing = optional and value is None
            self(name, missing or is_text(value), "a non-empty string" + " or None" * optional)

    def integer(self, *names: str, least: int, optional: bool = False) -> None:
        """Raises unless each is an integer of at least so much."""
        for name in names:
            value = self._given[name]
            is_integer = isinstance(value, int) and not isinstance(value, bool) and value >= least
            missing = optional and value is None
            self(name, missing or is_integer, f"an integer of at least {least}" + ", or None" * optional)

    def fractions(self) -> None:
        """Raises unless validation_fraction and test_fraction leave something to train on."""
        for name in ("validation_fraction", "test_fraction"):
            value = self._given[name]
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            self(name, is_number and 0 <= value < 1, "a number from 0 to below 1")
        most = 1 - self._given["validation_fraction"]
        self("test_fraction", self._given["test_fraction"] < most, f"below 1 - validation_fraction = {most:g}")


def check_arguments(given: Mapping[str, Any]) -> None:
    """Refuses arguments that cannot be meant.

    Args:
        given: The arguments of `TextCorpus` or `StreamingCorpus` by name.

    Raises:
        ValueError: It names the argument, what came and what was wanted.
    """

    need = Need(given)
    for name in ("source", "validation_source", "test_source"):
        value = given.get(name)
        specs = [value] if isinstance(value, str) else value
        fits = isinstance(specs, list) and bool(specs) and all(is_text(s) or isinstance(s, Mapping) for s in specs)
        need(name, fits or (value is None and name != "source"), "a non-empty string, or a list of such or of dicts")
        for entry in specs or ():
            if isinstance(entry, Mapping):
                _check_entry(name, entry)
    weights = [entry.get("weight", 1) for entry in given["source"] if isinstance(entry, Mapping)]
    need(
        "source", len(weights) != len(given["source"]) or sum(weights) > 0, "a mixture of which some weight is above 0"
    )
    need.integer("block_length", "batch_size", least=1)
    need.integer("eval_batch_size", "vocab_size", least=1, optional=True)
    need.integer("seed", "num_workers", least=0)
    need("split", given.get("split", "tail") in ("document", "tail"), '"document" or "tail"')
    need.integer(*(name for name in ("kept_documents", "shuffle_blocks") if name in given), least=1)
    value = given["special_tokens"]
    fits = value is None or (isinstance(value, list | tuple) and all(map(is_text, value)))
    need("special_tokens", fits, "a list of non-empty strings, or None")
    need.fractions()
    need.text("tokenizer", "text_column", "train_split")
    need("row_separator", isinstance(given.get("row_separator"), str | None), "a string or None")
    optional = ("config_name", "data_dir", "revision", "validation_split", "test_split", "cache_dir", "end_token")
    need.text(*optional, optional=True)


def _check_entry(argument: str, entry: Mapping[str, Any]) -> None:
    """Checks one source that is given as a dict."""
    known = [name for name in ENTRY_FIELDS if name != "weight" or argument == "source"]
    if unknown := sorted(set(entry) - set(known)):
        raise ValueError(f"{argument} has an entry with {', '.join(unknown)}; wanted some of {', '.join(known)}")
    if not is_text(entry.get("path")):
        raise ValueError(
            f"{argument} has an entry without a path: {dict(entry)!r}; wanted one such as {{'path': 'books'}}"
        )
    of_hub = [name for name in HUB_FIELDS if name in entry]
    if of_hub and not entry["path"].startswith(PREFIX):
        raise ValueError(
            f"{argument}: {', '.join(of_hub)} of {entry['path']!r} has no effect; wanted it of a hub set only"
        )
    for name, value in entry.items():
        if name == "weight":
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            fits, wanted = is_number and 0 <= value < float("inf"), "a number of at least 0"
        elif name in ("path", "text_column", "train_split"):
            fits, wanted = is_text(value), "a non-empty string"
        elif name == "row_separator":
            fits, wanted = isinstance(value, str | None), "a string or None"
        else:
            fits, wanted = value is None or is_text(value), "a non-empty string or None"
        if not fits:
            raise ValueError(f"{argument}: {name} of {entry['path']!r} must be {wanted}, got {value!r}")


def is_text(value: object) -> bool:
    """Whether it is a text with something in it."""
    return isinstance(value, str) and bool(value.strip())
