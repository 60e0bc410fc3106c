"""Every token is a target once, for any number of ranks and workers, and after a restart."""

import json
import pickle
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lin_attn.data.blocks import BlockDataset, BlockSampler, as_is
from lin_attn.data.corpus import TextCorpus
from lin_attn.data.loader import BlockLoader
from lin_attn.data.order import BlockOrder

MakeCorpus = Callable[..., TextCorpus]


def targets_seen(loaders: list[Any], stream: np.ndarray) -> np.ndarray:
    """How often each token was a target; checks that inputs, targets and bytes belong together."""
    seen = np.zeros(len(stream), dtype=int)
    for loader in loaders:
        for batch in loader:
            for tokens, targets, n_bytes, start in zip(*(batch[k].numpy() for k in batch), strict=True):
                n = int((targets >= 0).sum())
                assert (targets[n:] == -100).all()
                np.testing.assert_array_equal(targets[:n], stream[start : start + n])
                np.testing.assert_array_equal(tokens[:n], stream[start - 1 : start - 1 + n])
                assert (tokens[n:] == 256).all()
                assert n_bytes == (targets[:n] != 256).sum() - (targets[:n] == -100).sum()
                seen[start : start + n] += 1
    return seen


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_each_token_is_a_target_once_over_all_ranks(
    corpus: MakeCorpus, folder: Path, world_size: int, shuffle: bool
) -> None:
    data = corpus(folder)
    blocks = BlockDataset(data.stores["train"], data.tokenizer, block_length=7)
    stream = data.stores["train"].tokens(0, 10**9)
    assert 0 not in (len(blocks) % 2, len(blocks) % 3), "ranks must be uneven for the test to say anything"
    samplers = [
        BlockSampler(BlockOrder((0, len(blocks)), seed=3, shuffle=shuffle), rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    assert len({len(list(sampler)) for sampler in samplers}) == 1, "uneven ranks wait for each other for ever"
    loaders = [DataLoader(blocks, batch_size=5, sampler=sampler, collate_fn=as_is) for sampler in samplers]
    np.testing.assert_array_equal(targets_seen(loaders, stream), [0] + [1] * (len(stream) - 1))


def test_order_is_a_function_of_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = BlockSampler(BlockOrder((0, 100), seed=seed))
        sampler.set_epoch(epoch)
        return list(sampler)

    orders = [order(seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert all(sorted(one) == list(range(100)) for one in orders)
    assert len({tuple(one) for one in orders}) == 4
    assert order(1, 1) == orders[3]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_give_the_same_batches(corpus: MakeCorpus, folder: Path, method: str) -> None:
    data = corpus(folder)
    dataset = data.train_dataloader().dataset
    loaders = [
        DataLoader(
            dataset,
            batch_size=16,
            collate_fn=as_is,
            num_workers=workers,
            multiprocessing_context=method if workers else None,
        )
        for workers in (0, 1)
    ]
    plain, parallel = (list(loader) for loader in loaders)
    assert len(plain) == len(parallel)
    for one, other in zip(plain, parallel, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_store_pickles_as_its_path(corpus: MakeCorpus, folder: Path) -> None:
    store = corpus(folder).stores["train"]
    pickled = pickle.dumps(store)
    assert len(pickled) < 1000
    np.testing.assert_array_equal(pickle.loads(pickled).tokens(5, 50), store.tokens(5, 50))


class Recorder(pl.LightningModule):
    """Writes down the first target of each block it is trained and evaluated on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.train_starts: list[list[int]] = []
        self.eval_starts: list[int] = []

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.train_starts.append(batch["start"].tolist())
        return self.weight * 1.0

    def validation_step(self, batch: dict[str, torch.Tensor]) -> None:
        self.eval_starts += batch["start"].tolist()

    def predict_step(self, batch: dict[str, torch.Tensor]) -> None:
        self.eval_starts += batch["start"].tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters())


def trainer(tmp_path: Path, **options: Any) -> pl.Trainer:
    plain = {"accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(default_root_dir=tmp_path, **{**plain, **quiet, **options})


@pytest.mark.parametrize(("workers", "stop"), [(0, 30), (0, 42), (1, 50)])
def test_restart_goes_on_with_the_next_batch(
    corpus: MakeCorpus, folder: Path, tmp_path: Path, workers: int, stop: int
) -> None:
    def run(ckpt_path: Path | None = None) -> list[list[int]]:
        data, module = corpus(folder, num_workers=workers, batch_size=5), Recorder()
        assert len(data.train_dataloader()) == 42
        saved = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=stop, save_top_k=-1)
        trainer(tmp_path, max_steps=100, callbacks=[saved]).fit(module, data, ckpt_path=ckpt_path, weights_only=True)
        return module.train_starts

    whole = run()
    assert whole[:42] != whole[42:84]
    assert sorted(chain(*whole[:42])) == sorted(chain(*whole[42:84]))
    assert run(tmp_path / f"step={stop}.ckpt") == whole[stop:]


def test_checkpoint_of_a_shortened_epoch_begins_the_next_one(corpus: MakeCorpus, folder: Path, tmp_path: Path) -> None:
    def run(max_epochs: int, ckpt_path: str | None = None) -> tuple[list[list[int]], pl.Trainer]:
        fit = trainer(tmp_path, max_epochs=max_epochs, limit_train_batches=10, enable_checkpointing=False)
        module = Recorder()
        fit.fit(module, corpus(folder), ckpt_path=ckpt_path, weights_only=True)
        return module.train_starts, fit

    whole, _ = run(3)
    before, stopped = run(1)
    stopped.save_checkpoint(tmp_path / "stop.ckpt")
    after, _ = run(3, str(tmp_path / "stop.ckpt"))
    assert before + after == whole


def test_predict_reads_the_test_split_in_order(corpus: MakeCorpus, folder: Path, tmp_path: Path) -> None:
    module, data = Recorder(), corpus(folder)
    trainer(tmp_path).predict(module, data)
    assert module.eval_starts == list(range(1, len(data.stores["test"]), 8))


class RankRecorder(Recorder):
    """Saves what its rank has seen."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_fit_end(self) -> None:
        seen = {"train": self.train_starts, "validation": self.eval_starts}
        (self.folder / f"rank{self.global_rank}.json").write_text(json.dumps(seen))


def test_two_ranks_of_lightning_share_the_blocks(corpus: MakeCorpus, folder: Path, tmp_path: Path) -> None:
    """Lightning must neither replace our sampler nor wrap it in its own."""
    data = corpus(folder, block_length=7)
    sizes = {split: len(store) for split, store in data.stores.items()}
    fit = trainer(tmp_path, devices=2, strategy="ddp_fork", max_epochs=2, enable_checkpointing=False)
    fit.fit(RankRecorder(tmp_path), data)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    once = list(range(1, sizes["train"], 7))
    assert len(once) % 2, "ranks must be uneven for the test to say anything"
    steps = len(ranks[0]["train"]) // 2
    for epoch in (slice(0, steps), slice(steps, None)):
        blocks = [start for rank in ranks for batch in rank["train"][epoch] for start in batch]
        assert sorted(blocks) == [*once, sizes["train"]], "the empty block starts where the text has ended"
    assert ranks[0]["train"][:steps] != ranks[0]["train"][steps:]
    seen = sorted(start for rank in ranks for start in rank["validation"] if start < sizes["validation"])
    assert seen == sorted(2 * list(range(1, sizes["validation"], 7)))


def test_a_state_fits_any_number_of_processes_at_the_same_global_batch(corpus: MakeCorpus, folder: Path) -> None:
    blocks = corpus(folder).blocks("train")

    def loaders(world_size: int, batch_size: int, state: dict[str, int] | None = None) -> list[BlockLoader]:
        order, made = BlockOrder((0, len(blocks)), seed=3), []
        for rank in range(world_size):
            sampler = BlockSampler(order, rank=rank, world_size=world_size)
            made.append(BlockLoader(blocks, batch_size=batch_size, sampler=sampler, collate_fn=as_is))
            if state is not None:
                made[-1].load_state_dict(state)
        return made

    def batches(found: list[BlockLoader]) -> list[list[int]]:
        """The blocks of each step, of all ranks together; empty blocks left out."""
        steps = zip(*[[batch["start"].tolist() for batch in loader] for loader in found], strict=True)
        return [sorted(start for part in step for start in part if start < len(blocks.store)) for step in steps]

    whole = batches(loaders(1, 6))
    assert batches(loaders(2, 3)) == batches(loaders(3, 2)) == whole
    [loader] = loaders(1, 6)
    for _, _ in zip(range(4), loader, strict=False):
        state = loader.state_dict()
    for world_size in (1, 2, 3):
        assert batches(loaders(world_size, 6 // world_size, state)) == whole[4:]
    with pytest.raises(ValueError, match=r"batches of 6 blocks.*now 8; wanted 6"):
        next(iter(loaders(2, 4, state)[0]))
    assert batches(loaders(2, 4, {**state, "batches": 0})) == batches(loaders(2, 4)), "a new epoch fits any"
