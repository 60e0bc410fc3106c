"""Every configuration of configs/lm says how to run it, builds without a network, and trains on a look-alike.

Those of configs/roformer are in `test_roformer_configs`.
"""

import re

import datasets
import pytest
import yaml
from lightning.pytorch import LightningDataModule, LightningModule

from models.cli.configs import config_folder
from models.cli.training import TrainingCLI
from tests.data.look_alikes import LOOK_ALIKES, enwik8, wikitext

CONFIGS = sorted((config_folder() / "lm").glob("*.yaml"))


def source_of(path):
    return yaml.safe_load(path.read_text())["data"]["init_args"]["source"]


ON_HUB = [path for path in CONFIGS if str(source_of(path)).startswith("hub:")]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_builds_and_its_head_names_the_command_that_runs_it(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cli = TrainingCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        run=False,
        auto_configure_optimizers=False,
        load_from_checkpoint_support=False,
        args=["-c", str(path), "--trainer.logger", "false"],
    )
    assert cli.model.network_config.vocab_size >= cli.datamodule.vocab_size
    name = path.relative_to(config_folder()).as_posix()
    assert path.read_text().startswith(f"# lin-attn fit -c configs/{name}\n")
    assert cli.trainer.max_steps > 0


def test_the_configurations_of_the_hub_are_those_that_are_promised():
    wanted = {"wikitext2", "wikitext103", "enwik8", "text8", "tinystories", "pg19"}
    assert {path.stem for path in ON_HUB} == wanted


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """A `datasets` cache of the test's own, and no hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("path", ON_HUB, ids=lambda path: path.stem)
def test_it_trains_three_steps_on_a_look_alike_of_its_data_set(run, path, tmp_path, capsys):
    look_alike = LOOK_ALIKES[source_of(path)](tmp_path / "set")
    short = ["--model.network.d_model", "16", "--model.network.n_layers", "1", "--model.network.n_heads", "2"]
    short += ["--data.block_length", "16", "--data.batch_size", "2", "--trainer.max_steps", "3"]
    short += ["--trainer.val_check_interval", "3", "--trainer.limit_val_batches", "2"]
    short += ["--trainer.enable_progress_bar", "false"]
    assert run("fit", "-c", path, "--data.source", f"hub:{look_alike}", *short) == 0
    printed = capsys.readouterr().out
    assert re.search(r"validation bits per byte: \d", printed)
    assert (tmp_path / "runs" / path.stem / "version_0" / "checkpoints" / "last.ckpt").is_file()


@pytest.mark.usefixtures("offline")
def test_enwik8_is_the_whole_text_in_ninety_to_five_to_five(run, tmp_path, capsys):
    look_alike = enwik8(tmp_path / "set")
    text = next(iter(datasets.load_dataset("parquet", data_files=str(look_alike / "enwik8-raw/*/*"))["train"]))["text"]
    assert run("data", "info", "-c", "lm/enwik8.yaml", "--data.source", f"hub:{look_alike}") == 0
    rows = re.findall(r"(train|validation|test) +\d+ +([\d,]+)", capsys.readouterr().out)
    sizes = {split: int(size.replace(",", "")) for split, size in rows}
    total = len(text.encode())
    assert sizes == {
        "train": total - 2 * round(total / 20),
        "validation": round(total / 20),
        "test": round(total / 20),
    }


@pytest.mark.usefixtures("offline")
def test_wikitext_reads_the_configuration_that_is_named(run, tmp_path, capsys):
    look_alike = wikitext(tmp_path / "set")
    for config in ("wikitext-2-raw-v1", "wikitext-103-raw-v1"):
        name = config.replace("-raw-v1", "").replace("-", "")
        assert run("data", "info", "-c", f"lm/{name}.yaml", "--data.source", f"hub:{look_alike}") == 0
        assert f" = {config} train = \n Word" in capsys.readouterr().out.replace("\n\n", "\n")


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("path", ON_HUB, ids=lambda path: path.stem)
def test_without_the_hub_one_line_says_what_is_missing_and_what_to_set(run, path, tmp_path, capsys):
    assert run("fit", "-c", path, "--trainer.enable_progress_bar", "false") == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lin-attn")]
    for word in (source_of(path), str(tmp_path / "datasets"), "HF_HOME", "HF_HUB_OFFLINE=1", "local files"):
        assert word in line


def test_the_stdlib_twins_differ_in_attention_and_position_only():
    texts = {path.stem: path.read_text() for path in CONFIGS if path.stem.startswith("stdlib-")}
    assert len(texts) == 4

    def rest(text):
        text = re.sub(r"^#.*\n", "", text, flags=re.M)
        return re.sub(r"^ *(attention|feature_map|position|rope|default_root_dir):.*\n", "", text, flags=re.M)

    assert len({rest(text) for text in texts.values()}) == 1
