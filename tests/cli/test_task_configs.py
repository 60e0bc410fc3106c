"""Every configuration of a task says how to run it, is what it claims, and trains by one command on a look-alike."""

import csv
import re
from pathlib import Path

import datasets
import pytest
import yaml
from lightning.pytorch import Trainer

from lin_attn.data.special_tokens import SpecialTokens
from lin_attn.data.tokenizer import ByteTokenizer
from lin_attn.data.tokenizer_spec import TokenizerSpec
from models import MaskedLM
from models.checkpoint import load_checkpoint
from models.cli.configs import config_folder
from models.training import TrainedModel
from tests.data.task_look_alikes import LOOK_ALIKES, glue, word_piece

FOLDER = config_folder() / "roformer"
NETWORK = {"d_model": 16, "n_layers": 1, "n_heads": 2}
TINY = {
    "trainer.max_steps": 2,
    "trainer.val_check_interval": 2,
    "trainer.accumulate_grad_batches": 1,
    "trainer.limit_val_batches": 2,
    "trainer.enable_progress_bar": "false",
    **{f"model.network.{name}": value for name, value in NETWORK.items()},
}


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """A `datasets` cache of the test's own, and no hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def read(name):
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


def as_arguments(options):
    return [part for option, value in options.items() for part in (f"--{option}", str(value))]


def write_pretrained(path, network, tokenizer):
    """A checkpoint of a masked language model that was not trained."""
    model = MaskedLM({**network, **NETWORK})
    model.tokenizer = SpecialTokens(tokenizer, ("pad", "class", "separator", "mask"))
    trainer = Trainer(logger=False, accelerator="cpu", enable_checkpointing=False, enable_progress_bar=False)
    trainer.strategy.connect(model)
    Path(path).parent.mkdir(parents=True)
    trainer.save_checkpoint(path)


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_it_trains_two_steps_on_a_look_alike(run, name, tmp_path, capsys, caplog):
    config, options = read(name), LOOK_ALIKES[name](tmp_path / "set")
    network = config["model"]["init_args"]["network"]
    if "d_ff" in network:
        options |= {"model.network.d_ff": 32}
    if begins_with := config.get("initial_weights"):
        spec = options.get("data.tokenizer")
        tokenizer = ByteTokenizer() if spec is None else TokenizerSpec(str(spec)).open()
        write_pretrained(begins_with, network | {"d_ff": 32}, tokenizer)
    assert run("fit", "-c", f"roformer/{name}.yaml", *as_arguments(TINY | options)) == 0, capsys.readouterr().err
    figure = config["checkpoint"]["monitor"].removeprefix("val/")
    assert re.search(rf"validation {figure}: -?\d", printed := capsys.readouterr().out)
    assert ("validation mismatched/accuracy: " in printed) == (name == "glue-mnli")
    assert any("begins with the weights of" in message for message in caplog.messages) == bool(begins_with)
    saved = Path("runs", name, "version_0", "checkpoints")
    assert load_checkpoint(saved / "best.ckpt", kind=TrainedModel).tokenizer is not None


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_its_head_names_the_command_the_data_the_figure_and_the_machine(name):
    text = (FOLDER / f"{name}.yaml").read_text()
    head = re.match(r"(#.*\n)+", text)[0]
    assert head.startswith(f"# lin-attn fit -c configs/roformer/{name}.yaml\n")
    for word in ("Data: ", "Reaches " if name.startswith("small-") else "Expected: ", "Needs "):
        assert word in head
    assert read(name)["trainer"]["default_root_dir"] == f"runs/{name}"


def test_an_epoch_of_glue_is_a_validation_interval_and_training_three_of_them():
    examples = {"mrpc": 3668, "sst2": 67349, "qnli": 104743, "stsb": 5749, "qqp": 363846, "mnli": 392702}
    for task, n in examples.items():
        config = read(f"glue-{task}")
        steps = -(-n // config["data"]["init_args"]["batch_size"])
        assert (config["trainer"]["val_check_interval"], config["trainer"]["max_steps"]) == (steps, 3 * steps)
        assert f"{n:,} examples for training" in (FOLDER / f"glue-{task}.yaml").read_text()


@pytest.mark.parametrize("twins", ["wmt14-", "small-translation-", "small-classification-", "small-ranking-"])
def test_twins_differ_in_attention_and_position_only(twins):
    texts = [(FOLDER / f"{name}.yaml").read_text() for name in LOOK_ALIKES if name.startswith(twins)]
    bare = {re.sub(r"^(#.*| *(attention|position|default_root_dir):.*)\n", "", text, flags=re.M) for text in texts}
    assert len(texts) > 1
    assert len(bare) == 1


def test_info_counts_the_examples_of_each_part_and_shows_the_first(run, tmp_path, capsys):
    options = {"data.source": f"hub:{glue(tmp_path / 'set')}", "data.tokenizer": word_piece(tmp_path / "tokenizer")}
    assert run("data", "info", "-c", "roformer/glue-mnli.yaml", *as_arguments(options)) == 0
    printed = capsys.readouterr().out
    counts = re.findall(r"^ *(train|(?:validation|test) \w+) +(\d+) +\d+ +\d+$", printed, flags=re.M)
    judged = [(f"{role} {name}", "5") for role in ("validation", "test") for name in ("matched", "mismatched")]
    assert counts == [("train", "12"), *judged]
    assert "first: 0 alpha" in printed
    assert "label: 0" in printed


def test_a_checkpoint_is_judged_and_translates_every_test_pair(run, capsys):
    name, options = "small-translation-linear-rope", {"data.n_examples": 400, "data.eval_batch_size": 5}
    assert run("fit", "-c", f"roformer/{name}.yaml", *as_arguments(TINY | options)) == 0
    folder = Path("runs", name, "version_0")
    saved = ["-c", folder / "fit.yaml", "--ckpt_path", folder / "checkpoints" / "last.ckpt"]
    short = ["--trainer.limit_test_batches", "1", "--trainer.enable_progress_bar", "false"]
    assert run("test", *saved, *short) == 0
    assert "test/bleu" in capsys.readouterr().out
    assert run("predict", *saved, "--trainer.enable_progress_bar", "false") == 0
    [written] = Path("runs").glob("**/predictions.csv")
    count = int(re.search(r"predictions of (\d+) examples", capsys.readouterr().out)[1])
    with written.open(newline="") as file:
        assert [row["example"] for row in csv.DictReader(file)] == [str(i) for i in range(count)]
    assert 1 < count < 30
