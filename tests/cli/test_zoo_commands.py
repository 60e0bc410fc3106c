"""Each model of the zoo is trained, evaluated and used by the same commands as the language model."""

import csv

import pytest

from models.checkpoint import load_checkpoint
from models.cli import main
from models.training import TrainedModel
from tests.models.test_zoo_training import Data, class_batch, masked_batch, pair_batch, translated_batch

NETWORK = "{vocab_size: 12, d_model: 16, n_layers: 1, n_heads: 2%s}"


class MaskedData(Data):
    def __init__(self) -> None:
        super().__init__(masked_batch, steps=4)


class ClassData(Data):
    def __init__(self) -> None:
        super().__init__(class_batch, steps=4, tests=2)


class PairData(Data):
    def __init__(self) -> None:
        super().__init__(pair_batch, steps=4)


class TranslatedData(Data):
    def __init__(self) -> None:
        super().__init__(translated_batch, steps=4)


ZOO = {
    "MaskedLM": (MaskedData, "", {}, "loss"),
    "SequenceClassifier": (ClassData, "", {"n_classes": 2, "pooling": "mean"}, "accuracy"),
    "PairRanker": (PairData, ", n_token_types: 2", {"pooler": "gelu"}, "accuracy"),
    "Seq2Seq": (TranslatedData, "", {"begin_token": 0, "end_token": 1, "label_smoothing": 0.1, "beam_size": 2}, "bleu"),
}  # fmt: skip


@pytest.mark.parametrize("name", ZOO)
def test_fit_test_and_predict(name, tmp_path, capfd):
    data, fields, options, figure = ZOO[name]
    common = ["--data", f"{data.__module__}.{data.__name__}", "--trainer.default_root_dir", str(tmp_path),
              "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]  # fmt: skip
    model = ["--model", f"models.{name}", "--model.network", NETWORK % fields, "--model.optimizer.warmup_steps", "2"]
    model += [f"--model.{option}={value}" for option, value in options.items()]
    steps = ["--trainer.max_steps", "4", "--trainer.val_check_interval", "2", "--trainer.log_every_n_steps", "1"]
    assert main(["fit", *common, *model, *steps]) == 0, capfd.readouterr().err
    out = capfd.readouterr().out
    assert "validation loss: " in out
    assert f"validation {figure}: " in out
    run = tmp_path / "version_0"
    assert (run / "curves.png").is_file()
    with (run / "metrics.csv").open(newline="") as file:
        assert any(row["train/tokens_per_second"] for row in csv.DictReader(file))
    best = run / "checkpoints" / "best.ckpt"
    loaded = load_checkpoint(best, kind=TrainedModel)
    assert type(loaded).__name__ == name
    for option, value in options.items():
        assert loaded.hparams[option] == value

    # Of a checkpoint nothing else need be said: its class and arguments are its own.
    assert main(["test", *common, "--ckpt_path", str(best)]) == 0, capfd.readouterr().err
    out = capfd.readouterr().out
    assert f"is of models.{name}, which replaces models.CausalLM" in out
    with (tmp_path / "version_1" / "metrics.csv").open(newline="") as file:
        columns = next(csv.reader(file))
    assert f"test/{figure}" in columns
    assert ("test/mismatched/accuracy" in columns) == (name == "SequenceClassifier")
    assert main(["predict", *common, "--ckpt_path", str(best)]) == 0, capfd.readouterr().err
    assert "predictions of 96 examples" in capfd.readouterr().out


def test_an_argument_that_replaces_another_is_told(tmp_path, capfd):
    common = ["--data", f"{ClassData.__module__}.ClassData", "--trainer.default_root_dir", str(tmp_path),
              "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]  # fmt: skip
    model = ["--model", "models.SequenceClassifier", "--model.network", NETWORK % ""]
    assert main(["fit", *common, *model, "--trainer.max_steps", "2", "--trainer.val_check_interval", "2"]) == 0
    best = tmp_path / "version_0" / "checkpoints" / "best.ckpt"
    capfd.readouterr()
    changed = [
        "--model",
        "models.SequenceClassifier",
        "--model.network",
        NETWORK % ", ffn: swiglu",
        "--model.pooler",
        "none",
    ]
    assert main(["validate", *common, *changed, "--ckpt_path", str(best)]) == 0
    out = capfd.readouterr().out
    assert "network.ffn=gelu, which replaces swiglu" in out
    assert "pooler=tanh, which replaces none" in out
    assert out.count("which replaces") == 2


def test_a_checkpoint_of_another_class_is_refused_in_one_line(tmp_path, capfd):
    common = ["--data", f"{MaskedData.__module__}.MaskedData", "--trainer.default_root_dir", str(tmp_path),
              "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]  # fmt: skip
    model = ["--model", "models.MaskedLM", "--model.network", NETWORK % ""]
    assert main(["fit", *common, *model, "--trainer.max_steps", "2", "--trainer.val_check_interval", "2"]) == 0
    capfd.readouterr()
    best = tmp_path / "version_0" / "checkpoints" / "best.ckpt"
    assert main(["generate", "--checkpoint", str(best)]) == 2
    assert capfd.readouterr().err.endswith("a MaskedLM; wanted one of a CausalLM\n")
