"""Examples are trained on once an epoch, by any number of processes, and after a restart where it stopped."""

import copy
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lin_attn.data import ClassificationData, RankingData, TranslationData
from lin_attn.data.batches import TokenBatches
from models import PairRanker, Seq2Seq, SequenceClassifier
from tests.data.task_files import as_rank, pair_rows, translation_rows, triple_rows, write_jsonl

N = 47  # of which train gets a number that neither 2 nor 3 processes nor the batch size divide
KEYS = {"ClassificationData": "tokens", "RankingData": "first_tokens", "TranslationData": "source"}


@pytest.fixture(params=["classification", "ranking", "translation"])
def make(request, tmp_path, monkeypatch):
    """Makes one of the three data modules anew, on the same rows."""
    monkeypatch.setenv("LIN_ATTN_CACHE", str(tmp_path / "cache"))
    classes = {"classification": ClassificationData, "ranking": RankingData, "translation": TranslationData}
    rows = {"classification": pair_rows, "ranking": triple_rows, "translation": translation_rows}[request.param](N)
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    options = {
        "classification": {"text_column": "a", "pair_column": "b", "batch_size": 4},
        "ranking": {"batch_size": 4},
        "translation": {"batch_tokens": 256, "max_length": 128},
    }[request.param]

    def build(**more):
        return classes[request.param](str(file), **{"seed": 3, "eval_batch_size": 5, **options, **more})

    return build


def texts_of(module, batches):
    """The first text of each example, in order."""
    found = []
    for batch in batches:
        for row in batch[KEYS[type(module).__name__]]:
            found.append(module.tokenizer.decode(row[row < 256].numpy()).decode().split()[0])
    return found


def epoch_of(loader, epoch):
    loader.sampler.set_epoch(epoch)
    return list(loader)


def same(batches, others):
    return len(batches) == len(others) and all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
        for a, b in zip(batches, others, strict=True)
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_example_comes_once_an_epoch_over_all_processes(make, world_size):
    loaders = [as_rank(make(), rank, world_size).train_dataloader() for rank in range(world_size)]
    module = make()
    everyone = sorted(texts_of(module, [module.collate(module.parts["train"][0].rows[:])]))
    assert 30 < len(everyone) < N
    assert len({len(loader) for loader in loaders}) == 1
    for epoch in range(2):
        batches = [epoch_of(loader, epoch) for loader in loaders]
        assert len({len(found) for found in batches}) == 1, "uneven ranks wait for each other for ever"
        assert sorted(texts_of(module, chain(*batches))) == everyone


def test_the_order_is_a_function_of_seed_and_epoch(make):
    orders = {}
    for seed in (3, 4):
        for epoch in (0, 1):
            orders[seed, epoch] = texts_of(make(), epoch_of(make(seed=seed).train_dataloader(), epoch))
            assert orders[seed, epoch] == texts_of(make(), epoch_of(make(seed=seed).train_dataloader(), epoch))
    assert len({tuple(order) for order in orders.values()}) == 4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_goes_on_where_its_state_was_taken(make, num_workers):
    whole = epoch_of(make().train_dataloader(), 1)
    interrupted = make(num_workers=num_workers).train_dataloader()
    interrupted.sampler.set_epoch(1)
    batches = iter(interrupted)
    begun = [next(batches) for _ in range(2)]
    state = copy.deepcopy(interrupted.state_dict())
    resumed = make().train_dataloader()
    resumed.load_state_dict(state)
    assert same(begun + epoch_of(resumed, 1), whole)
    assert same(epoch_of(resumed, 1), whole), "a state is for one epoch"


def test_evaluation_has_every_example_in_order_over_all_processes(make):
    module = make(validation_fraction=0.4)
    [part] = module.parts["validation"]
    everyone = texts_of(module, [module.collate(part.rows[:])])
    assert len(everyone) > 10
    [one] = as_rank(make(validation_fraction=0.4), 0, 1).val_dataloader()
    assert texts_of(module, one) == everyone
    ranks = [as_rank(make(validation_fraction=0.4), rank, 3).val_dataloader()[0] for rank in range(3)]
    assert sorted(texts_of(module, [batch for loader in ranks for batch in loader])) == sorted(everyone)


@pytest.mark.parametrize("batch_tokens", [40, 64, 1000])
def test_token_batches_keep_their_size_and_their_number(batch_tokens):
    lengths = np.random.default_rng(0).integers(2, 40, (301, 2))
    batches = TokenBatches(lengths, batch_tokens, seed=1)
    shapes = []
    for epoch in range(3):
        found = batches.epoch(epoch)
        assert len(found) == len(batches)
        assert sorted(np.concatenate(found)) == list(range(301))
        assert all(len(rows) * lengths[rows].max() <= batch_tokens for rows in found)
        shapes.append(sorted((len(rows), int(lengths[rows].max())) for rows in found))
    assert shapes[0] == shapes[1] == shapes[2]
    assert any(not np.array_equal(a, b) for a, b in zip(batches.epoch(0), batches.epoch(1), strict=True))


def test_token_batches_waste_little_on_padding():
    lengths = np.random.default_rng(0).integers(2, 40, (3000, 1))
    found = TokenBatches(lengths, 512, seed=1).epoch(0)
    assert lengths.sum() / sum(len(rows) * lengths[rows].max() for rows in found) > 0.97


def test_an_example_of_more_than_batch_tokens_is_refused():
    with pytest.raises(ValueError, match="batch_tokens is 9, and an example has 10 tokens"):
        TokenBatches(np.array([[3, 10]]), 9, seed=0)


@pytest.mark.parametrize("numbers", [False, True])
def test_a_batch_without_examples_adds_nothing_to_loss_gradient_and_figures(make, numbers):
    """It is what the last processes get where examples do not divide."""
    module = make()
    if isinstance(module, ClassificationData):
        module = make(numbers=numbers)
    network = {"vocab_size": 300, "d_model": 8, "n_layers": 1, "n_heads": 1}
    typed = network | {"n_token_types": 2}
    model = {
        "ClassificationData": lambda: SequenceClassifier(typed, n_classes=1 if numbers else 2),
        "RankingData": lambda: PairRanker(typed),
        "TranslationData": lambda: Seq2Seq(network),
    }[type(module).__name__]()
    model.trainer = SimpleNamespace(testing=False)
    rows = module.parts["train"][0].rows
    none, some = module.collate(rows[[]]), module.collate(rows[:5])
    total, count = model.loss_sum(none)
    total.backward()
    assert (total.item(), count.item()) == (0, 0)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters()), "each process needs its gradients"
    figures = []
    for batches in ((some,), (none, some, none)):
        metric = model.new_metric("val")
        for batch in batches:
            model.evaluate(batch, metric)
        figures.append({name: value.item() for name, value in metric.compute().items()})
    assert figures[0] == pytest.approx(figures[1], nan_ok=True)
