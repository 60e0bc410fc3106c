"""What data modules of examples take: each argument is checked before anything is read."""

from collections.abc import Mapping
from typing import Any


def check_example_arguments(given: Mapping[str, Any]) -> None:
    """Refuses arguments of `ExampleData` that cannot be meant.

    Args:
        given: The arguments by name.

    Raises:
        ValueError: It names the argument, what came and what was wanted.
    """
    need = Need(given)
    need.text("source", "tokenizer", "train_split")
    need.text(
        "validation_source",
        "test_source",
        "config_name",
        "data_dir",
        "revision",
        "cache_dir",
        "end_token",
        optional=True,
    )
    for name in ("validation_split", "test_split"):
        value = given[name]
        several = isinstance(value, list | tuple) and bool(value) and all(map(_is_text, value))
        need(name, value is None or _is_text(value) or several, "a non-empty string, a list of such, or None")
    need.integer("max_length", least=1)
    need.integer("eval_batch_size", "n_examples", "vocab_size", least=1, optional=True)
    need.integer("seed", "num_workers", least=0)
    for name in ("validation_fraction", "test_fraction"):
        value = given[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        need(name, is_number and 0 <= value < 1, "a number from 0 to below 1")
    most = 1 - given["validation_fraction"]
    need("test_fraction", given["test_fraction"] < most, f"below 1 - validation_fraction = {most:g}")


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
            self(name, missing or _is_text(value), "a non-empty string" + " or None" * optional)

    def integer(self, *names: str, least: int, optional: bool = False) -> None:
        """Raises unless each is an integer of at least so much."""
        for name in names:
            value = self._given[name]
            is_integer = isinstance(value, int) and not isinstance(value, bool) and value >= least
            missing = optional and value is None
            self(name, missing or is_integer, f"an integer of at least {least}" + ", or None" * optional)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
