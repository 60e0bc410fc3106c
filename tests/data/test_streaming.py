"""Streams: nothing is lost or doubled in a pass, and a restart goes on with the next batch, workers or not."""

import json
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from lightning.pytorch.callbacks import ModelCheckpoint

from lin_attn.data.splits import bytes_hash
from lin_attn.data.stream_blocks import Share, Stream, StreamBlocks
from lin_attn.data.stream_loader import StreamLoader
from lin_attn.data.streaming import StreamingCorpus
from lin_attn.data.tokenizer import ByteTokenizer
from tests.data.look_alikes import story, write_split
from tests.data.test_corpus_blocks import Recorder, trainer

MakeStream = Callable[..., StreamingCorpus]
N_ROWS = 50


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fifty rows in five files to train on and six for validation; no split for test."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    rows: list[str | None] = [story(i)[: 20 + 7 * i] for i in range(N_ROWS)]
    rows[3], rows[17] = None, ""
    write_split(tmp_path / "set", "train", {"text": rows, "id": list(range(N_ROWS))}, n_files=5)
    write_split(tmp_path / "set", "validation", {"text": [story(i) for i in range(6)]})
    return tmp_path / "set"


@pytest.fixture
def stream(hub: Path, tmp_path: Path) -> MakeStream:
    def make(**options: Any) -> StreamingCorpus:
        plain = {"block_length": 8, "batch_size": 4, "shuffle_blocks": 16, "test_fraction": 0.2}
        return StreamingCorpus(f"hub:{hub}", cache_dir=str(tmp_path / "cache"), **{**plain, **options})

    return make


def rows_of(hub: Path) -> Any:
    return datasets.load_dataset(str(hub), split="train", streaming=True)


def documents_of(hub: Path) -> list[bytes]:
    return [row["text"].encode() for row in rows_of(hub) if row["text"]]


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (1, 3), (2, 0), (2, 2), (5, 0), (3, 1)])
def test_one_pass_over_all_ranks_and_workers_has_every_token_once(hub: Path, world_size: int, workers: int) -> None:
    """Each reader's stream is its documents over and over; together they have every document once a pass."""
    tokenizer, seen, block_length = ByteTokenizer(), Counter(), 64
    for rank in range(world_size):
        rows = split_dataset_by_node(rows_of(hub), rank=rank, world_size=world_size)
        blocks = StreamBlocks([Stream(rows, "text")], tokenizer, block_length, 1, shuffle_blocks=1, rank=rank)
        loader = StreamLoader(blocks, num_workers=workers, world_size=1)
        n_readers = max(workers, 1)
        # As copies: a tensor of another process holds a file open.
        batches = [{k: v.numpy().copy() for k, v in batch.items()} for batch in islice(loader, 300)]
        for worker in range(n_readers):
            mine = batches[worker::n_readers]
            targets = np.concatenate([batch["targets"].ravel() for batch in mine])
            inputs = np.concatenate([batch["tokens"].ravel() for batch in mine])
            assert sum(int(batch["n_bytes"].sum()) for batch in mine) == int((targets != 256).sum())
            np.testing.assert_array_equal(inputs, [256, *targets[:-1]])
            found = [
                bytes(part[:-1].astype(np.uint8)) for part in np.split(targets, np.flatnonzero(targets == 256) + 1)
            ]
            whole = [part for part in found[:-1] if part]
            n_pass = whole.index(whole[0], 1)  # where the second pass begins
            assert whole[n_pass : 2 * n_pass] == whole[:n_pass]
            seen.update(whole[:n_pass])
    assert seen == Counter(documents_of(hub))


@pytest.mark.parametrize("shuffle_blocks", [1, 16])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_gives_the_batches_that_would_have_come(stream: MakeStream, workers: int, shuffle_blocks: int) -> None:
    def loader() -> StreamLoader:
        made = stream(num_workers=workers, shuffle_blocks=shuffle_blocks).train_dataloader()
        assert isinstance(made, StreamLoader)
        return made

    whole, batches, states = loader(), [], []
    for batch in islice(whole, 400):  # more than one pass
        batches.append({name: value.clone() for name, value in batch.items()})
        states.append(json.loads(json.dumps(whole.state_dict())))
    for at in (0, 3, 4, 101, 378):
        resumed = loader()
        resumed.load_state_dict(states[at])
        for wanted, batch in zip(batches[at + 1 : at + 20], resumed, strict=False):
            assert all(torch.equal(batch[name], wanted[name]) for name in wanted)
        assert resumed.state_dict()["batches"] > at + 1


def test_shuffling_keeps_the_blocks_of_a_window(stream: MakeStream) -> None:
    def blocks(shuffle_blocks: int) -> list[tuple[int, ...]]:
        loader = stream(shuffle_blocks=shuffle_blocks).train_dataloader()
        return [tuple(row.tolist()) for batch in islice(loader, 16) for row in batch["targets"]]

    plain, shuffled = blocks(1), blocks(16)
    assert plain != shuffled
    for window in range(0, 64, 16):
        assert sorted(plain[window : window + 16]) == sorted(shuffled[window : window + 16])


class Words(Recorder):
    """Writes down the targets, since a stream has no places."""

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.train_starts.append(batch["targets"].tolist())
        return self.weight * 1.0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_restart_of_lightning_goes_on_with_the_next_batch(stream: MakeStream, tmp_path: Path, workers: int) -> None:
    def run(ckpt_path: Path | None = None) -> list[Any]:
        module = Words()
        saved = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=13, save_top_k=-1)
        options: dict[str, Any] = {"val_check_interval": 10, "check_val_every_n_epoch": None, "max_steps": 40}
        fit = trainer(tmp_path, callbacks=[saved], **options)
        fit.fit(module, stream(num_workers=workers), ckpt_path=ckpt_path, weights_only=True)
        assert module.eval_starts
        return module.train_starts

    whole = run()
    assert len(whole) == 40
    assert run(tmp_path / "step=26.ckpt") == whole[26:]


class RankWords(Words):
    """Saves what its rank has seen."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_fit_end(self) -> None:
        (self.folder / f"rank{self.global_rank}.json").write_text(json.dumps(self.train_starts))


def test_two_ranks_of_lightning_read_other_rows_and_go_on(stream: MakeStream, tmp_path: Path) -> None:
    def run(ckpt_path: Path | None = None) -> list[Any]:
        saved = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=7, save_top_k=-1)
        fit = trainer(tmp_path, devices=2, strategy="ddp_fork", max_steps=20, callbacks=[saved])
        fit.fit(RankWords(tmp_path), stream(), ckpt_path=ckpt_path, weights_only=True)
        return [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]

    whole = run()
    assert whole[0] != whole[1]
    assert run(tmp_path / "step=14.ckpt") == [rank[14:] for rank in whole]


def test_what_is_held_out_is_never_trained_on(stream: MakeStream, hub: Path) -> None:
    data = stream()
    documents = documents_of(hub)
    held = [text for text in documents if bytes_hash(text) < 0.2]
    assert 2 <= len(held) < len(documents)
    store = data.stores["test"]
    assert data.tokenizer.decode(store.tokens(0, 10**9)) == b"".join(held)
    assert data.stores["validation"].n_documents == 6
    seen = b"".join(
        data.tokenizer.decode(batch["targets"].numpy())
        for batch in islice(stream(shuffle_blocks=1).train_dataloader(), 900)
    )
    assert not any(text in seen for text in held if len(text) > 40)
    assert all(text in seen for text in documents if text not in held)


def test_a_mixture_of_streams_keeps_its_weights_at_every_point(hub: Path) -> None:
    rows = [rows_of(hub), rows_of(hub).map(lambda row: {"text": "1" * len(row["text"] or "")})]
    streams = [Stream(rows[0], "text", Share(), 3.0), Stream(rows[1], "text", Share(), 1.0)]
    blocks = StreamBlocks(streams, ByteTokenizer(), 8, 1, shuffle_blocks=1)
    ones = [int((batch["targets"] == ord("1")).sum()) > 4 for batch in islice(StreamLoader(blocks, num_workers=0), 400)]
    for n in range(1, 401):
        assert abs(sum(ones[:n]) - n / 4) <= 1.5


def test_a_bpe_of_a_stream_is_learned_from_its_first_documents(stream: MakeStream) -> None:
    data = stream(tokenizer="bpe", vocab_size=300, kept_documents=10)
    assert data.stores["train"].n_documents == 10
    assert data.tokenizer.vocab_size > 257
    batch = next(iter(data.train_dataloader()))
    assert int(batch["n_bytes"].sum()) > batch["targets"].numel()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_workers": 6}, "num_workers is 6.*5 files.*at most 5"),
        ({"text_column": "id"}, "'id' holds a int, wanted text"),
        ({"text_column": "body"}, "no column 'body'.*'text', 'id'"),
        ({"train_split": "train[:10%]"}, "a stream has no slices"),
        ({"validation_split": "dev"}, "no split 'dev'"),
    ],
)
def test_what_a_stream_cannot_give_is_named(stream: MakeStream, options: dict[str, Any], says: str) -> None:
    def first() -> Any:
        data = stream(**options)
        data.setup("fit")
        return next(iter(data.train_dataloader()))

    with pytest.raises(ValueError, match=says):
        first()


def test_only_sets_of_the_hub_are_streamed() -> None:
    with pytest.raises(ValueError, match="'stdlib'; wanted hub"):
        StreamingCorpus("stdlib")


def test_a_state_of_another_layout_is_refused(stream: MakeStream) -> None:
    one, other = stream().train_dataloader(), stream(batch_size=8).train_dataloader()
    next(iter(one))
    with pytest.raises(ValueError, match=r"'batch_size': 4.*'batch_size': 8.*wanted the same"):
        other.load_state_dict(one.state_dict())  # type: ignore[attr-defined]


def test_a_hub_out_of_reach_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"hub:Nobody/nothing.*HF_HOME.*HF_HUB_OFFLINE=1"):
        StreamingCorpus("hub:Nobody/nothing", cache_dir=str(tmp_path)).setup()


def test_endless_loaders_have_a_length_that_lightning_can_add_up(stream: MakeStream) -> None:
    assert len(stream().train_dataloader()) * 1024 < 2**63
