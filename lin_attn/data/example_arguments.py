"""What data modules of examples take: each argument is checked before anything is read."""

from collections.abc import Mapping
from typing import Any

from lin_attn.data.arguments import Need, is_text


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
        several = isinstance(value, list | tuple) and bool(value) and all(map(is_text, value))
        need(name, value is None or is_text(value) or several, "a non-empty string, a list of such, or None")
    need.integer("max_length", least=1)
    need.integer("eval_batch_size", "n_examples", "vocab_size", least=1, optional=True)
    need.integer("seed", "num_workers", least=0)
    need.fractions()
