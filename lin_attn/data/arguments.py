"""What `TextCorpus` and `StreamingCorpus` take: each argument is checked before anything is read."""

from collections.abc import Mapping
from typing import Any

from lin_attn.data.hub import PREFIX
from lin_attn.data.sources import ENTRY_FIELDS

HUB_FIELDS = ("config_name", "data_dir", "revision", "train_split", "validation_split", "test_split")


def check_arguments(given: Mapping[str, Any]) -> None:
    """Refuses arguments that cannot be meant.

    Args:
        given: The arguments of `TextCorpus` or `StreamingCorpus` by name.

    Raises:
        ValueError: It names the argument, what came and what was wanted.
    """

    def need(name: str, fits: bool, wanted: str) -> None:
        if not fits:
            raise ValueError(f"{name} must be {wanted}, got {given[name]!r}")

    for name in ("source", "validation_source", "test_source"):
        value = given.get(name)
        specs = [value] if isinstance(value, str) else value
        fits = isinstance(specs, list) and bool(specs) and all(_is_text(s) or isinstance(s, Mapping) for s in specs)
        need(name, fits or (value is None and name != "source"), "a non-empty string, or a list of such or of dicts")
        for entry in specs or ():
            if isinstance(entry, Mapping):
                _check_entry(name, entry)
    weights = [entry.get("weight", 1) for entry in given["source"] if isinstance(entry, Mapping)]
    need(
        "source", len(weights) != len(given["source"]) or sum(weights) > 0, "a mixture of which some weight is above 0"
    )
    for name in ("block_length", "batch_size"):
        need(name, _is_int(given[name], 1), "an integer of at least 1")
    value = given["eval_batch_size"]
    need("eval_batch_size", value is None or _is_int(value, 1), "an integer of at least 1, or None")
    for name in ("seed", "num_workers"):
        need(name, _is_int(given[name], 0), "an integer of at least 0")
    need("split", given.get("split", "tail") in ("document", "tail"), '"document" or "tail"')
    for name in ("kept_documents", "shuffle_blocks"):
        need(name, _is_int(given.get(name, 1), 1), "an integer of at least 1")
    need("tokenizer", _is_text(given["tokenizer"]), "a non-empty string")
    value = given["vocab_size"]
    need("vocab_size", value is None or _is_int(value, 1), "an integer of at least 1, or None")
    value = given["special_tokens"]
    fits = value is None or (isinstance(value, list | tuple) and all(map(_is_text, value)))
    need("special_tokens", fits, "a list of non-empty strings, or None")
    for name in ("validation_fraction", "test_fraction"):
        value = given[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        need(name, is_number and 0 <= value < 1, "a number from 0 to below 1")
    most = 1 - given["validation_fraction"]
    need("test_fraction", given["test_fraction"] < most, f"below 1 - validation_fraction = {most:g}")
    for name in ("text_column", "train_split"):
        need(name, _is_text(given[name]), "a non-empty string")
    need("row_separator", isinstance(given.get("row_separator"), str | None), "a string or None")
    for name in ("config_name", "data_dir", "revision", "validation_split", "test_split", "cache_dir", "end_token"):
        need(name, given[name] is None or _is_text(given[name]), "a non-empty string or None")


def _check_entry(argument: str, entry: Mapping[str, Any]) -> None:
    """Checks one source that is given as a dict."""
    known = [name for name in ENTRY_FIELDS if name != "weight" or argument == "source"]
    if unknown := sorted(set(entry) - set(known)):
        raise ValueError(f"{argument} has an entry with {', '.join(unknown)}; wanted some of {', '.join(known)}")
    if not _is_text(entry.get("path")):
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
            fits, wanted = _is_text(value), "a non-empty string"
        elif name == "row_separator":
            fits, wanted = isinstance(value, str | None), "a string or None"
        else:
            fits, wanted = value is None or _is_text(value), "a non-empty string or None"
        if not fits:
            raise ValueError(f"{argument}: {name} of {entry['path']!r} must be {wanted}, got {value!r}")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_int(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
