"""fit, validate, test and predict: Lightning's command line, with the defaults of this project.

Models and data are named by class in the configuration, so that every model of the zoo is trained by the same command.
"""

import logging
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from models.callbacks import PredictionWriter, RunProgressBar, Throughput
from models.checkpoint import read_checkpoint
from models.cli import innermost
from models.cli.configs import find_config
from models.hardware import default_precision
from models.report import report_run


class Parser(LightningArgumentParser):
    """Tells a mistake in the arguments without the list of all arguments above it."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Prints the message and ends with status 2."""
        sys.stderr.write(f"lin-attn: {innermost(message)}\n")
        sys.exit(2)


class TrainingCLI(LightningCLI):
    """LightningCLI with loggers, checkpoints, precision and a closing report."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses the arguments that `main` was given, which need not be those of the process."""
        self.config = parser.parse_args(args)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds `--checkpoint`, the saving of the best and the last model, and this project's defaults."""
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults(
            {
                "model": {"class_path": "models.CausalLM"},
                "data": {"class_path": "lin_attn.data.TextCorpus"},
                "checkpoint.monitor": "val/bits_per_byte",
                "checkpoint.filename": "best",
                "checkpoint.enable_version_counter": False,
                "checkpoint.save_last": True,
                "trainer.default_root_dir": "runs",
                "trainer.precision": default_precision(),
                "trainer.enable_model_summary": False,
                # Validation goes by steps, over the ends of epochs and in corpora of less than an interval.
                "trainer.check_val_every_n_epoch": None,
                "trainer.val_check_interval": 100,
            }
        )

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "predict":  # the writer has them; a corpus of them need not stand in memory
            parser.set_defaults({"return_predictions": False})
        return parser

    def before_instantiate_classes(self) -> None:
        """Names the saved configuration by stage, so that `validate` spares that of `fit`; adds the callbacks."""
        self.save_config_kwargs = {"config_filename": f"{self.subcommand}.yaml", "overwrite": True}
        trainer = self._get(self.config, "trainer")
        if trainer["gradient_clip_val"] is not None:
            raise ValueError(
                f"trainer.gradient_clip_val is {trainer['gradient_clip_val']}; wanted optimizer.clip of the model, "
                "which clips fused optimizers under mixed precision too"
            )
        callbacks: list[Callback] = [Throughput(), PredictionWriter()]
        if trainer["enable_progress_bar"] is not False and "ProgressBar" not in str(trainer["callbacks"]):
            callbacks.append(RunProgressBar())
        self.trainer_defaults = {"callbacks": callbacks}

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """A trainer that logs to CSV and TensorBoard in one folder, unless the configuration names its loggers."""
        configured = self._get(self.config_init, "trainer")
        if configured["logger"] in (None, True):
            root = configured["default_root_dir"]
            version = claim_version(Path(root))
            kwargs["logger"] = [kind(root, name="", version=version) for kind in (CSVLogger, TensorBoardLogger)]
        if configured["enable_checkpointing"] is False:
            self._parser(self.subcommand).callback_keys.clear()  # those of add_arguments_to_parser: `checkpoint`
        return super().instantiate_trainer(**kwargs)

    def _parse_ckpt_path(self) -> None:
        """A checkpoint's own network and optimizer go before the configuration's; each difference is printed."""
        if not self.config.get("subcommand"):
            return
        arguments = self.config[self.config["subcommand"]]
        path = arguments.get("ckpt_path")
        if path is None and self.config["subcommand"] != "fit":
            raise ValueError("ckpt_path is not given, and an untrained model is not worth it; wanted --ckpt_path FILE")
        if path is None:
            return
        saved = read_checkpoint(path)["hyper_parameters"]
        given = arguments["model"].get("init_args", {})
        for group, values in saved.items():
            for name, value in values.items():
                was = given[group][name] if group in given and name in given[group] else None
                if (list(was) if isinstance(was, tuple) else was) != value:
                    print(f"{path} was made with {group}.{name}={value}, which replaces {was}")  # noqa: T201
        model = {"class_path": arguments["model"]["class_path"], "init_args": saved}
        self.config = self.parser.parse_object({self.config["subcommand"]: {"model": model}}, self.config)

    def after_fit(self) -> None:
        """Says what was reached and where it lies."""
        report_run(self.trainer, self.model)


def main(command: str, arguments: list[str]) -> None:
    """Runs a stage of training as `lin-attn COMMAND ARGUMENTS…`."""
    _silence_lightning()
    TrainingCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        seed_everything_default=0,
        parser_class=Parser,
        parser_kwargs={"prog": "lin-attn"},
        auto_configure_optimizers=False,
        load_from_checkpoint_support=False,
        args=[command, *_with_found_configs(arguments)],
    )


def _silence_lightning() -> None:
    """Advertisements, and warnings of Lightning's about its own insides."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda record: "Tip:" not in record.msg)
    for message in (".*LeafSpec.*", ".*does not have many workers.*", ".*The dirpath has changed from.*"):
        warnings.filterwarnings("ignore", message)


def claim_version(root: Path) -> int:
    """The number of the first `version_N` that is not there, whose folder is made: two runs at once get two."""
    version, rank = 0, getattr(rank_zero_only, "rank", 0)
    while True:
        folder = root / f"version_{version}"
        if rank != 0 and not folder.exists():
            return version  # the first process makes the folder; only it writes there
        if rank == 0:
            with suppress(FileExistsError):
                folder.mkdir(parents=True)
                return version
        version += 1


def _with_found_configs(arguments: list[str]) -> list[str]:
    """The arguments with each configuration's name replaced by its path."""
    found = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        flag, equals, value = argument.partition("=")
        if before in ("-c", "--config"):
            found.append(str(find_config(argument)))
        elif equals and flag in ("-c", "--config"):
            found.append(f"{flag}={find_config(value)}")
        else:
            found.append(argument)
    return found
