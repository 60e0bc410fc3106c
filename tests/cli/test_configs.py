"""Every shipped configuration says how to run it, is parsed, and builds its model and data without a network."""

import re

import pytest
from lightning.pytorch import LightningDataModule, LightningModule

from models.cli.configs import config_folder
from models.cli.training import TrainingCLI

CONFIGS = sorted(config_folder().rglob("*.yaml"))


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


def test_the_stdlib_twins_differ_in_attention_and_position_only():
    texts = {path.stem: path.read_text() for path in CONFIGS if path.stem.startswith("stdlib-")}
    assert len(texts) == 4

    def rest(text):
        text = re.sub(r"^#.*\n", "", text, flags=re.M)
        return re.sub(r"^ *(attention|feature_map|position|rope|default_root_dir):.*\n", "", text, flags=re.M)

    assert len({rest(text) for text in texts.values()}) == 1
