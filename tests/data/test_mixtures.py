"""Mixtures follow their weights, and lose and double nothing."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lin_attn.data.corpus import TextCorpus
from lin_attn.data.order import BlockOrder, shares


def test_an_epoch_follows_the_weights_and_no_block_comes_twice_before_all_of_its_source_came_once() -> None:
    bounds, weights = (0, 7, 47, 100), (5.0, 0.0, 3.0)
    order = BlockOrder(bounds, seed=4, weights=weights)
    epochs = [order.epoch(e) for e in range(12)]
    drawn: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for epoch in epochs:
        assert len(epoch) == 100
        sources = np.searchsorted(bounds, epoch, side="right") - 1
        assert Counter(sources.tolist()) == {0: 62, 2: 38} or Counter(sources.tolist()) == {0: 63, 2: 37}
        for source, block in zip(sources.tolist(), epoch.tolist(), strict=True):
            drawn[source].append(block)
    for source in (0, 2):
        counts = Counter(drawn[source])
        assert set(counts) == set(range(bounds[source], bounds[source + 1]))
        assert max(counts.values()) - min(counts.values()) <= 1
    assert epochs[0].tolist() != sorted(epochs[0].tolist())
    np.testing.assert_array_equal(BlockOrder(bounds, seed=4, weights=weights).epoch(7), epochs[7])


def test_shares_are_whole_and_sum_to_the_total() -> None:
    assert shares((1, 1, 1), 100) == [34, 33, 33]
    assert shares((2, 1), 9) == [6, 3]
    assert shares((0, 1e-9), 5) == [0, 5]


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    """A file of a's and a table of b's under another column."""
    (tmp_path / "a.txt").write_text("a" * 800)
    rows = "".join(json.dumps({"body": "b" * 50}) + "\n" for _ in range(40))
    (tmp_path / "b.jsonl").write_text(rows)
    return [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]


def options(two: list[str], **weights: float) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = [{"path": two[0]}, {"path": two[1], "text_column": "body"}]
    for entry, name in zip(entries, "ab", strict=True):
        if name in weights:
            entry["weight"] = weights[name]
    return entries


def letters(data: TextCorpus) -> tuple[int, int]:
    """How many a's and b's an epoch has as targets."""
    targets = np.concatenate([batch["targets"].numpy().ravel() for batch in data.train_dataloader()])
    return int((targets == ord("a")).sum()), int((targets == ord("b")).sum())


@pytest.mark.usefixtures("corpus")
def test_without_weights_every_source_is_read_once_and_with_them_in_proportion(two: list[str]) -> None:
    def make(**weights: float) -> TextCorpus:
        return TextCorpus(options(two, **weights), 8, 4, validation_fraction=0.0, test_fraction=0.0)

    assert letters(make()) == (800, 2000)
    plain = make()
    bounds = plain.source_blocks()
    assert bounds[0] == 0
    assert bounds[-1] == len(plain.blocks("train"))
    assert bounds[1] == -(-801 // 8)
    for weights, share in (({"a": 3.0}, 0.75), ({"a": 1, "b": 9}, 0.1), ({"a": 0}, 0.0)):
        data = make(**weights)
        assert data.stores["train"].folder == plain.stores["train"].folder, "weights need no new cache"
        a, b = letters(data)
        assert a / (a + b) == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({}, "without a path"),
        ({"path": "x", "wieght": 1}, "wieght.*weight"),
        ({"path": "x", "weight": -1}, "weight of 'x' must be a number of at least 0, got -1"),
        ({"path": "x", "weight": 0}, "some weight is above 0"),
        ({"path": "x", "config_name": "y"}, "config_name of 'x' has no effect"),
        ({"path": "hub:x", "text_column": ""}, "text_column of 'hub:x'"),
    ],
)
def test_an_entry_that_cannot_be_meant_is_refused_by_name(entry: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TextCorpus([entry])


@pytest.mark.usefixtures("corpus")
def test_a_source_too_short_for_its_weight_is_named(two: list[str], tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("abc")
    entries = [
        {"path": two[0], "weight": 1},
        {"path": str(tmp_path / "short.txt"), "weight": 1},
        {"path": two[0] + "x"},
    ]
    (tmp_path / "a.txtx").write_text("c" * 100)
    data = TextCorpus(entries, 64, 4, validation_fraction=0.0, test_fraction=0.0)
    with pytest.raises(ValueError, match="source 1 has the weight 1, but too little"):
        data.train_dataloader()
