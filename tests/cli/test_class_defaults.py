"""A class that is named in place of the default one has its own defaults."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningDataModule, LightningModule

from lin_attn.data import StreamingCorpus, TextCorpus
from models.cli.training import Parser, TrainingCLI


class Rows(LightningDataModule):
    """A data module with an argument that `TextCorpus` has too."""

    def __init__(self, batch_size: int = 3, rows: int = 5) -> None:
        super().__init__()
        self.batch_size, self.rows = batch_size, rows


ROWS = f"{__name__}.Rows"


def built(*arguments: str) -> Any:
    return TrainingCLI(
        LightningModule, LightningDataModule, subclass_mode_model=True, subclass_mode_data=True, run=False,
        parser_class=Parser, auto_configure_optimizers=False, load_from_checkpoint_support=False,
        args=["--trainer.logger", "false", *arguments],
    )  # fmt: skip


def test_on_the_command_line_and_in_a_configuration(tmp_path: Path) -> None:
    assert inspect.signature(TextCorpus).parameters["batch_size"].default != 3
    path = tmp_path / "a.yaml"
    path.write_text(f"data:\n  class_path: {ROWS}\n  init_args: {{rows: 7}}\n")
    for arguments, rows in ((["--data", ROWS], 5), (["-c", str(path)], 7), ([f"--data.class_path={ROWS}"], 5)):
        data = built(*arguments).datamodule
        assert (data.batch_size, data.rows) == (3, rows)
    assert built("-c", str(path), "--data.batch_size", "4").datamodule.batch_size == 4


def test_of_our_own_classes() -> None:
    streamed = built("--data", "lin_attn.data.StreamingCorpus", "--data.source", "hub:a/b").datamodule
    wanted = inspect.signature(StreamingCorpus).parameters["validation_fraction"].default
    assert streamed.hparams["validation_fraction"] == wanted != 0.05


def test_the_default_classes_keep_theirs_and_take_options() -> None:
    cli = built("--data.batch_size", "7", "--model.network.d_model", "64")
    assert isinstance(cli.datamodule, TextCorpus)
    assert (cli.datamodule.batch_size, cli.datamodule.block_length) == (7, 256)
    assert (cli.model.network_config.d_model, cli.model.network_config.n_layers) == (64, 4)


def test_an_argument_that_the_chosen_class_lacks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        built("--data", ROWS, "--data.tokenizer", "bytes")
    assert "tokenizer" in capsys.readouterr().err
