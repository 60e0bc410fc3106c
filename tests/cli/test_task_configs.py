"""Every configuration of a task says how to run it, is what it claims, and trains by one command on a look-alike."""

import datasets
import pytest
import yaml

from models.cli.configs import config_folder
from tests.data.task_look_alikes import GLUE, of_config, word_piece

FOLDER = config_folder() / "roformer"
KINDS = ("wmt14-", "glue-", "cail2019-", "small-translation-", "small-classification-", "small-ranking-")
CONFIGS = sorted(path for path in FOLDER.glob("*.yaml") if path.stem.startswith(KINDS))
SMALL = [path for path in CONFIGS if path.stem.startswith("small-")]


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """A `datasets` cache of the test's own, and no hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_trains_two_steps_at_tiny_size(run, path, tmp_path, capsys):
    config = yaml.safe_load(path.read_text())
    data, trainer = config["data"]["init_args"], config["trainer"]
    arguments = ["--model.network.d_model", "16", "--model.network.n_layers", "1", "--model.network.n_heads", "2"]
    if config["model"]["init_args"]["network"].get("d_ff"):
        arguments += ["--model.network.d_ff", "32"]
    if (made := of_config(path.stem)) is not None:
        make, prefix = made
        arguments += ["--data.source", f"{prefix}{make(tmp_path / 'set')}", "--data.num_workers", "0"]
    else:
        arguments += ["--data.n_examples", "400"]
    if str(data.get("tokenizer")).startswith("hub:"):
        arguments += ["--data.tokenizer", str(word_piece(tmp_path / "tokenizer"))]
    accumulated = min(2, trainer.get("accumulate_grad_batches", 1))  # an epoch of few batches ends a step before more
    arguments += ["--trainer.accumulate_grad_batches", str(accumulated)]
    arguments += ["--data.batch_tokens", "256"] if "batch_tokens" in data else ["--data.batch_size", "2"]
    arguments += [
        "--trainer.max_steps",
        "2",
        "--trainer.val_check_interval",
        str(2 * accumulated),
        "--data.eval_batch_size",
        "2",
    ]
    arguments += ["--trainer.limit_val_batches", "2", "--trainer.enable_progress_bar", "false"]
    assert run("fit", "-c", path, *arguments) == 0
    printed = capsys.readouterr().out
    figure = config["checkpoint"]["monitor"].removeprefix("val/").replace("_", " ")
    assert f"validation {figure}: " in printed
    if path.stem == "glue-mnli":
        assert "validation mismatched/accuracy: " in printed
    assert (tmp_path / "runs" / path.stem / "version_0" / "checkpoints" / "best.ckpt").is_file()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_its_head_names_the_command_that_runs_it(path):
    first, *rest = path.read_text().splitlines()
    name = path.relative_to(config_folder()).as_posix()
    assert first.startswith(f"# lin-attn fit -c configs/{name}")
    head = "\n".join(line for line in rest if line.startswith("# "))
    assert ("reached" if path in SMALL else "The paper") in head
    assert yaml.safe_load(path.read_text())["trainer"]["default_root_dir"] == f"runs/{path.stem}"


def test_the_configurations_are_those_of_the_paper():
    found = {path.stem for path in CONFIGS}
    wanted = {f"glue-{task}" for task in GLUE} | {"cail2019-scm-512", "cail2019-scm-1024"}
    wanted |= {f"wmt14-en-de-{position}" for position in ("rope", "sinusoidal")}
    wanted |= {f"small-translation-{a}-{p}" for a in ("linear", "softmax") for p in ("rope", "sinusoidal")}
    assert wanted <= found


def without(config, *paths):
    for path in paths:
        *parents, last = path.split(".")
        place = config
        for parent in parents:
            place = place[parent]
        place.pop(last, None)
    return config


@pytest.mark.parametrize("kind", ["wmt14-", "small-translation-", "small-classification-", "small-ranking-"])
def test_twins_differ_in_attention_and_position_only(kind):
    twins = [yaml.safe_load(path.read_text()) for path in CONFIGS if path.stem.startswith(kind)]
    network = "model.init_args.network"
    rest = [without(c, f"{network}.attention", f"{network}.position", "trainer.default_root_dir") for c in twins]
    assert len(rest) > 1
    assert all(config == rest[0] for config in rest)
