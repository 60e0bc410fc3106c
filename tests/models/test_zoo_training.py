"""Each model of the zoo learns, has figures that are what they are called, and goes into a checkpoint and back."""

import copy
import csv

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader

from lin_attn.data.blocks import IGNORED
from models import CausalLM, MaskedLM, PairRanker, Seq2Seq, SequenceClassifier
from models.averaging import average_checkpoints, last_checkpoints
from models.callbacks import ExampleWriter
from models.checkpoint import load_checkpoint
from models.cli import main
from models.optimization import lr_factor
from models.throughput import Throughput
from models.training import TrainedModel

VOCAB, BEGIN, END, MASK = 12, 0, 1, 11
NETWORK = {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 2}
OPTIMIZER = {"lr": 1e-2, "warmup_steps": 10, "weight_decay": 0.0}
STEPS = 60


def masks(lengths, width):
    return torch.arange(width)[None] < lengths[:, None]


def masked_batch(generator):
    """Sequences that count upwards by a step of their own; three of the ten tokens are masked."""
    start, step = (torch.randint(low, high, (32, 1), generator=generator) for low, high in ((0, 9), (1, 3)))
    text = 2 + (start + step * torch.arange(10)) % 9
    hidden = torch.rand(text.shape, generator=generator).argsort(1) < 3
    key_mask = masks(torch.randint(6, 11, (32,), generator=generator), 10)
    hidden &= key_mask
    return {
        "tokens": text.masked_fill(hidden, MASK),
        "targets": text.masked_fill(~hidden, IGNORED),
        "key_mask": key_mask,
    }


def class_batch(generator):
    """Whether the token 2 comes before the token 3."""
    tokens = torch.randint(4, 11, (32, 8), generator=generator)
    places = torch.rand(tokens.shape, generator=generator).argsort(1)[:, :2]
    tokens.scatter_(1, places, torch.tensor([2, 3]).expand(32, 2))
    return {"tokens": tokens, "labels": (places[:, 0] < places[:, 1]).long()}


def number_batch(generator):
    """How many of the tokens are 2, in a text with padding of 2s."""
    tokens = torch.randint(2, 5, (32, 8), generator=generator)
    key_mask = masks(torch.randint(3, 9, (32,), generator=generator), 8)
    count = ((tokens == 2) & key_mask).sum(1) / key_mask.sum(1)
    return {"tokens": tokens, "key_mask": key_mask, "labels": count.float()}


def pair_batch(generator):
    """A pair whose two halves are of the same numbers above one whose halves are not."""
    half = torch.randint(2, 6, (32, 4), generator=generator)
    other = torch.randint(6, 10, (32, 4), generator=generator)
    types = torch.tensor([0] * 4 + [1] * 4).expand(32, 8)
    shuffled = half[:, torch.randperm(4, generator=generator)]
    first, second = torch.cat((half, shuffled), dim=1), torch.cat((half, other), dim=1)
    return {"first_tokens": first, "second_tokens": second, "first_types": types, "second_types": types}


def translated_batch(generator, longest=6):
    """The source backwards, every token one higher."""
    lengths = torch.randint(2, longest + 1, (32,), generator=generator)
    source = torch.randint(2, 11, (32, longest), generator=generator)
    target = torch.full((32, longest + 2), END)
    target[:, 0] = BEGIN
    for row, n in enumerate(lengths.tolist()):
        target[row, 1 : n + 1] = 2 + (source[row, :n].flip(0) - 1) % 9
    return {
        "source": source,
        "target": target,
        "source_mask": masks(lengths, longest),
        "target_mask": masks(lengths + 2, longest + 2),
    }


def text_batch(generator):
    tokens = masked_batch(generator)["tokens"]
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "n_bytes": torch.full((32,), 9),
        "start": torch.zeros(32),
    }


ZOO = {
    "causal lm": (lambda **o: CausalLM(NETWORK, **o), text_batch),
    "masked lm": (lambda **o: MaskedLM(NETWORK, **o), masked_batch),
    "classifier": (lambda **o: SequenceClassifier(NETWORK, **o), class_batch),
    "regression": (lambda **o: SequenceClassifier(NETWORK, n_classes=1, pooling="mean", **o), number_batch),
    "ranker": (lambda **o: PairRanker(NETWORK | {"n_token_types": 2}, **o), pair_batch),
    "seq2seq": (
        lambda **o: Seq2Seq(NETWORK, begin_token=BEGIN, end_token=END, label_smoothing=0.1, **o), translated_batch
    ),
}  # fmt: skip


class Data(LightningDataModule):
    """A few batches for each stage."""

    def __init__(self, make, steps=STEPS, tests=1):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.train, self.val = ([make(generator) for _ in range(n)] for n in (steps, 3))
        self.tests, self.test_names = tests, ["matched", "mismatched"]

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=None)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=None)

    def test_dataloader(self):
        loaders = [DataLoader(self.val[i:], batch_size=None) for i in range(self.tests)]
        return loaders if self.tests > 1 else loaders[0]

    predict_dataloader = val_dataloader


def trainer(folder, steps=STEPS, **options):
    return Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, enable_checkpointing=False, precision="32-true", num_sanity_val_steps=0, **options,
    )  # fmt: skip


@pytest.fixture(params=ZOO)
def kind(request):
    return request.param


def fresh(kind, **optimizer):
    torch.manual_seed(0)
    return ZOO[kind][0](optimizer=OPTIMIZER | optimizer)


def test_sixty_steps_of_training_lower_the_loss_clearly(kind, tmp_path):
    model, data = fresh(kind), Data(ZOO[kind][1])
    run = trainer(tmp_path, callbacks=[Throughput()])
    before = run.validate(model, data, verbose=False)[0]["val/loss"]
    run.fit(model, data)
    after = run.validate(model, data, verbose=False)[0]["val/loss"]
    assert after < 0.7 * before


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_a_translation_is_learned_nearly_to_the_last_token(attention, tmp_path):
    torch.manual_seed(0)
    model = Seq2Seq(
        NETWORK | {"attention": attention, "position": "sinusoidal", "d_model": 64, "n_layers": 1},
        OPTIMIZER | {"lr": 5e-3, "schedule": "inverse_sqrt"},
        begin_token=BEGIN, end_token=END, label_smoothing=0.1,
    )  # fmt: skip
    data = Data(lambda generator: translated_batch(generator, 4), steps=250)
    run = trainer(tmp_path, steps=250)
    run.fit(model, data)
    figures = run.test(model, data, verbose=False)[0]
    assert figures["test/accuracy"] > 0.95
    assert figures["test/bleu"] > 85


def test_a_checkpoint_gives_the_same_model_back_and_says_what_it_is(kind, tmp_path):
    model, data = fresh(kind), Data(ZOO[kind][1], steps=2)
    run = trainer(tmp_path, steps=2)
    run.fit(model, data)
    run.save_checkpoint(tmp_path / "a.ckpt")
    loaded = load_checkpoint(tmp_path / "a.ckpt", kind=TrainedModel)
    assert type(loaded) is type(model)
    assert loaded.hparams == model.hparams
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    again = run.validate(loaded, data, verbose=False)[0]
    for name, value in run.validate(model, data, verbose=False)[0].items():
        assert again[name] == value
    if kind != "causal lm":
        with pytest.raises(ValueError, match=f"{type(model).__name__}; wanted one of a CausalLM"):
            load_checkpoint(tmp_path / "a.ckpt")


# Figures


def evaluated(kind, tmp_path):
    model, data = fresh(kind), Data(ZOO[kind][1], tests=2)
    run = trainer(tmp_path, steps=15)
    run.fit(model, data)
    return model.eval(), data, run.test(model, data, verbose=False)


def test_masked_figures_are_over_masked_tokens_alone(tmp_path):
    model, data, (figures, second) = evaluated("masked lm", tmp_path)
    logits = torch.cat([model(b["tokens"], b["key_mask"]).flatten(0, 1) for b in data.val])
    targets = torch.cat([b["targets"].flatten() for b in data.val])
    hits = (logits.argmax(-1) == targets)[targets != IGNORED].float().mean().item()
    assert figures["test/loss"] == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-5)
    assert figures["test/accuracy"] == pytest.approx(hits, rel=1e-6)
    # The second loader has two batches of the three, and a name of its own.
    targets, logits = targets[320:], logits[320:]
    assert second["test/mismatched/loss"] == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-5)


def test_classification_figures_are_accuracy_and_f1(tmp_path):
    model, data, (figures, _) = evaluated("classifier", tmp_path)
    predicted = torch.cat([model(b["tokens"]).argmax(-1) for b in data.val])
    labels = torch.cat([b["labels"] for b in data.val])
    right = (predicted == labels).sum().item()
    both = ((predicted == 1) & (labels == 1)).sum().item()
    assert figures["test/accuracy"] == pytest.approx(right / 96, rel=1e-6)
    assert figures["test/f1"] == pytest.approx(
        2 * both / ((predicted == 1).sum() + (labels == 1).sum()).item(), rel=1e-6
    )


def test_regression_figures_are_pearson_and_spearman(tmp_path):
    model, data, (figures, _) = evaluated("regression", tmp_path)
    x = torch.cat([model(b["tokens"], b["key_mask"])[:, 0] for b in data.val]).detach().double()
    y = torch.cat([b["labels"] for b in data.val]).double()

    def ranks(values):  # ties share the mean of their ranks
        return torch.stack([(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values])

    assert figures["test/pearson"] == pytest.approx(torch.corrcoef(torch.stack((x, y)))[0, 1].item(), rel=1e-4)
    wanted = torch.corrcoef(torch.stack((ranks(x), ranks(y))))[0, 1].item()
    assert figures["test/spearman"] == pytest.approx(wanted, rel=1e-4)
    assert figures["test/loss"] == pytest.approx((x - y).square().mean().item(), rel=1e-5)


def test_the_rankers_accuracy_is_the_share_of_pairs_in_order(tmp_path):
    model, data, (figures, _) = evaluated("ranker", tmp_path)
    margins = torch.cat([
        model(b["first_tokens"], None, b["first_types"]) - model(b["second_tokens"], None, b["second_types"])
        for b in data.val
    ])  # fmt: skip
    assert figures["test/accuracy"] == pytest.approx((margins > 0).float().mean().item(), rel=1e-6)
    assert figures["test/loss"] == pytest.approx(F.softplus(-margins).mean().item(), rel=1e-5)


def test_the_seq2seq_loss_is_unsmoothed_in_evaluation_and_smoothed_in_training(tmp_path):
    model, data, (figures, _) = evaluated("seq2seq", tmp_path)

    def mean(smoothing):
        logits = torch.cat([
            model(b["source"], b["target"][:, :-1], b["source_mask"], b["target_mask"][:, :-1]).flatten(0, 1)
            for b in data.val
        ])  # fmt: skip
        targets = torch.cat(
            [b["target"][:, 1:].masked_fill(~b["target_mask"][:, 1:], IGNORED).flatten() for b in data.val]
        )
        return F.cross_entropy(logits, targets, label_smoothing=smoothing).item()

    assert figures["test/loss"] == pytest.approx(mean(0.0), rel=1e-5)
    sums = [model.loss_sum(batch) for batch in data.val]
    trained_on = sum(s for s, _ in sums) / sum(n for _, n in sums)
    assert trained_on.item() == pytest.approx(mean(0.1), rel=1e-5)


def test_bleu_is_of_whole_targets_up_to_their_end():
    model = fresh("seq2seq")
    assert model.texts(torch.tensor([[4, 5, END, 7], [3, 4, 5, 6]])) == ["4 5", "3 4 5 6"]
    metric = model.new_metric("val")["bleu"]
    metric.update(["2 3 4 5 6"], [["2 3 4 5 6"]])
    assert metric.compute() == 100


def test_predictions_are_written_a_row_an_example(kind, tmp_path):
    if kind == "causal lm":
        pytest.skip("its predictions are of documents: tests/cli")
    model, data = fresh(kind), Data(ZOO[kind][1], steps=1)
    trainer(tmp_path, callbacks=[ExampleWriter()]).predict(model, data, return_predictions=False)
    with (tmp_path / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 96
    wanted = model.eval().predict_step(data.val[2], 2)
    for name, values in wanted.items():
        got = rows[64 + 5][name]
        value = values[5].tolist() if isinstance(values, torch.Tensor) else values[5]
        assert got == (" ".join(map(str, value)) if isinstance(value, list) else str(value))


# Averages and schedules


def checkpoints(folder, kind="masked lm"):
    """Six of a run, at steps 1 to 6, and the last of them once more."""
    model, data = fresh(kind), Data(ZOO[kind][1], steps=6)
    saved = []
    for step in range(1, 7):
        run = trainer(folder, steps=1)
        run.fit(model, DataLoader(data.train[step - 1 : step], batch_size=None))
        run.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = step
        run.save_checkpoint(folder / f"{step}.ckpt")
        saved.append(copy.deepcopy(model.state_dict()))
    run.save_checkpoint(folder / "last.ckpt")
    return saved


def test_the_average_of_the_last_checkpoints_is_the_mean_of_their_weights(tmp_path, capsys):
    saved = checkpoints(tmp_path)
    assert main(["average", str(tmp_path), "--last", "5", "--out", str(tmp_path / "out" / "mean.ckpt")]) == 0
    assert "mean of 5 checkpoints" in capsys.readouterr().out
    model = load_checkpoint(tmp_path / "out" / "mean.ckpt", kind=MaskedLM)
    for name, value in model.state_dict().items():
        wanted = torch.stack([state[name].double() for state in saved[1:]]).mean(0).float()
        assert torch.equal(value, wanted)
    data = Data(masked_batch)
    by_path = trainer(tmp_path).validate(fresh("masked lm"), data, ckpt_path=tmp_path / "out" / "mean.ckpt",
                                         weights_only=True, verbose=False)  # fmt: skip
    assert by_path == trainer(tmp_path).validate(model, data, verbose=False)


def test_what_cannot_be_averaged_is_refused(tmp_path, capsys):
    checkpoints(tmp_path)
    (tmp_path / "other").mkdir()
    model = MaskedLM(NETWORK | {"d_model": 16})
    run = trainer(tmp_path, steps=1)
    run.fit(model, Data(masked_batch, steps=1))
    run.save_checkpoint(tmp_path / "other" / "a.ckpt")
    with pytest.raises(ValueError, match="another network"):
        average_checkpoints([tmp_path / "1.ckpt", tmp_path / "other" / "a.ckpt"])
    with pytest.raises(ValueError, match="6 steps; wanted 7"):
        last_checkpoints(tmp_path, 7)
    with pytest.raises(ValueError, match="empty"):
        average_checkpoints([])
    assert main(["average", str(tmp_path / "1.ckpt"), "--last", "2", "--out", str(tmp_path / "b.ckpt")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_inverse_square_root_linear_and_constant_schedules():
    factors = {name: [lr_factor(step, 10, 110, 0.2, name) for step in range(150)]
               for name in ("inverse_sqrt", "linear", "constant")}  # fmt: skip
    for name in factors:
        assert factors[name][:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    # Vaswani et al., eq. 3: min(step^−0.5, step · warmup^−1.5), counted from 1, over its greatest value.
    paper = [min(step**-0.5, step * 10**-1.5) / 10**-0.5 for step in range(1, 151)]
    assert factors["inverse_sqrt"] == pytest.approx(paper)
    assert factors["linear"][10::25] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    assert set(factors["constant"][10:]) == {1.0}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"schedule": "step"}, "schedule"),
        ({"schedule": "inverse_sqrt", "warmup_steps": 0}, "warmup_steps"),
        ({"schedule": "inverse_sqrt", "min_lr_ratio": 0.2}, "min_lr_ratio"),
        ({"schedule": "constant", "max_steps": 10}, "max_steps"),
    ],
)
def test_a_wrong_or_idle_field_of_the_schedule_is_refused_by_name(fields, named):
    with pytest.raises(ValueError, match=named):
        MaskedLM(NETWORK, optimizer=fields)


def test_a_schedule_without_an_end_needs_no_last_step(tmp_path):
    run = Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                  enable_model_summary=False, default_root_dir=tmp_path)  # fmt: skip
    run.fit(fresh("masked lm", schedule="inverse_sqrt"), Data(masked_batch, steps=3))
    assert run.global_step == 3


def test_a_model_that_is_not_finite_stops_at_once_and_says_where(kind, tmp_path):
    model = fresh(kind)
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "blocks.0.attention.query" in name).fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="step 0"):
        trainer(tmp_path).fit(model, Data(ZOO[kind][1], steps=1))


def test_data_for_another_model_are_refused_and_both_are_named(kind, tmp_path):
    same = {"classifier": "regression", "regression": "classifier"}
    for other in set(ZOO) - {kind, same.get(kind)}:
        with pytest.raises(ValueError, match=f"data is a Data.*wanted data for a {type(fresh(kind)).__name__}"):
            trainer(tmp_path).fit(fresh(kind), Data(ZOO[other][1]))
