"""What `TextCorpus` takes: each argument is checked before anything is read."""

from collections.abc import Mapping
from typing import Any


def check_arguments(given: Mapping[str, Any]) -> None:
    """Refuses arguments that cannot be meant.

    Args:
        given: The arguments of `TextCorpus` by name.

    Raises:
        ValueError: It names the argument, what came and what was wanted.
    """

    def need(name: str, fits: bool, wanted: str) -> None:
        if not fits:
            raise ValueError(f"{name} must be {wanted}, got {given[name]!r}")

    for name in ("source", "validation_source", "test_source"):
        value = given[name]
        specs = [value] if isinstance(value, str) else value
        fits = isinstance(specs, list) and bool(specs) and all(map(_is_text, specs))
        need(name, fits or (value is None and name != "source"), "a non-empty string or a list of such")
    for name in ("block_length", "batch_size"):
        need(name, _is_int(given[name], 1), "an integer of at least 1")
    value = given["eval_batch_size"]
    need("eval_batch_size", value is None or _is_int(value, 1), "an integer of at least 1, or None")
    for name in ("seed", "num_workers"):
        need(name, _is_int(given[name], 0), "an integer of at least 0")
    need("split", given["split"] in ("document", "tail"), '"document" or "tail"')
    for name in ("validation_fraction", "test_fraction"):
        value = given[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        need(name, is_number and 0 <= value < 1, "a number from 0 to below 1")
    most = 1 - given["validation_fraction"]
    need("test_fraction", given["test_fraction"] < most, f"below 1 - validation_fraction = {most:g}")
    for name in ("text_column", "train_split"):
        need(name, _is_text(given[name]), "a non-empty string")
    need("row_separator", isinstance(given["row_separator"], str | None), "a string or None")
    for name in ("config_name", "revision", "validation_split", "test_split", "cache_dir"):
        need(name, given[name] is None or _is_text(given[name]), "a non-empty string or None")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_int(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
