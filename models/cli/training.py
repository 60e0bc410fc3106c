"""fit, validate, test and predict: Lightning's command line, with the defaults of this project.

Models and data are named by class in the configuration, so that every model of the zoo is trained by the same command.
"""

import logging
import sys
import warnings
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.utilities import rank_zero_only

from models.callbacks import ExampleWriter, PredictionWriter, RunProgressBar
from models.causal_lm import CausalLM
from models.checkpoint import class_of, newest_checkpoint, read_checkpoint
from models.checkpoint_io import AtomicCheckpointIO
from models.cli import innermost
from models.cli.configs import find_config
from models.hardware import default_precision
from models.initial_weights import InitialWeights
from models.last_checkpoint import LastCheckpoint
from models.report import BITS_PER_BYTE, report_run
from models.throughput import FetchTimer, Throughput


class Parser(LightningArgumentParser):
    """Tells a mistake without the list of all arguments above it, and keeps the defaults of classes apart.

    A class that is named in place of the default one would otherwise take over the default's arguments as far as it has
    them: the batch_size of `TextCorpus` would be that of every data module.
    """

    def get_defaults(self, *args: Any, **kwargs: Any) -> Namespace:
        """The defaults as they were set: which class, and its arguments only where some were set with it.

        The others are those of the class that is chosen in the end, which the parser adds when it knows it.
        """
        defaults = super().get_defaults(*args, **kwargs)
        for action in self._actions:
            if isinstance(action.default, Namespace) and "class_path" in action.default:
                defaults[action.dest] = action.default.clone()
        return defaults

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Prints the message and ends with status 2."""
        sys.stderr.write(f"lin-attn: {' '.join(innermost(message).split())}\n")
        sys.exit(2)


class TrainingCLI(LightningCLI):
    """LightningCLI with loggers, checkpoints, precision and a closing report."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses the arguments that `main` was given, which need not be those of the process."""
        self.config = parser.parse_args(args)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds `--checkpoint`, the best model's, `--last_checkpoint`, initial weights, and this project's defaults."""
        parser.add_argument(
            "--initial_weights",
            type=str | None,
            default=None,
            help="model whose weights fit begins with: a .ckpt, a folder of save_pretrained, a name",
        )
        parser.add_argument(
            "--replaced_weights", type=list[str] | None, default=None,
            help="parts of the model, such as head, that begin anew with initial_weights",
        )  # fmt: skip
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.add_lightning_class_args(LastCheckpoint, "last_checkpoint")
        parser.set_defaults(
            {
                "model": {"class_path": "models.CausalLM"},
                "data": {"class_path": "lin_attn.data.TextCorpus"},
                "checkpoint.monitor": BITS_PER_BYTE,
                "checkpoint.filename": "best",
                "checkpoint.enable_version_counter": False,
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
        self._monitor_a_figure_of_the_model()
        if trainer["gradient_clip_val"] is not None:
            raise ValueError(
                f"trainer.gradient_clip_val is {trainer['gradient_clip_val']}; wanted optimizer.clip of the model, "
                "which clips fused optimizers under mixed precision too"
            )
        callbacks: list[Callback] = [Throughput(), *self._initial_weights()]
        if trainer["enable_progress_bar"] is not False and "ProgressBar" not in str(trainer["callbacks"]):
            callbacks.append(RunProgressBar())
        self.trainer_defaults = {"callbacks": callbacks}

    def _initial_weights(self) -> list[Callback]:
        """What loads them, in a run of fit that does not go on from a checkpoint."""
        path, replaced = (self._get(self.config, f"{name}_weights") for name in ("initial", "replaced"))
        if path is None and replaced:
            raise ValueError(f"replaced_weights is {replaced} without initial_weights; leave it out")
        begins = self.subcommand == "fit" and self._get(self.config, "ckpt_path") is None
        return [InitialWeights(path, replaced or ())] if path is not None and begins else []

    def _monitor_a_figure_of_the_model(self) -> None:
        """Bits per byte, which is the default, are a figure of causal language models; the loss is one of all."""
        checkpoint = self._get(self.config, "checkpoint")
        kind = find_class(self._get(self.config, "model")["class_path"])
        if checkpoint["monitor"] == BITS_PER_BYTE and not issubclass(kind, CausalLM):
            checkpoint["monitor"] = "val/loss"

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """A trainer that logs to CSV and TensorBoard in one folder, unless the configuration names its loggers."""
        configured = self._get(self.config_init, "trainer")
        writer = PredictionWriter() if isinstance(self.model, CausalLM) else ExampleWriter()
        self.trainer_defaults["callbacks"].append(writer)
        if configured["logger"] in (None, True):
            root = configured["default_root_dir"]
            version = claim_version(Path(root))
            # Each row at once: a run that is killed has logged up to its checkpoint.
            csv = CSVLogger(root, name="", version=version, flush_logs_every_n_steps=1)
            kwargs["logger"] = [csv, TensorBoardLogger(root, name="", version=version)]
        if configured["enable_checkpointing"] is False:
            self._parser(self.subcommand).callback_keys.clear()  # those of add_arguments_to_parser
        plugins = configured["plugins"] or []
        plugins = plugins if isinstance(plugins, list) else [plugins]
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            kwargs["plugins"] = [*plugins, AtomicCheckpointIO()]
        if configured["profiler"] is None:
            kwargs["profiler"] = FetchTimer()
        return super().instantiate_trainer(**kwargs)

    def _parse_ckpt_path(self) -> None:
        """A checkpoint's own class and arguments go before the configuration's; each difference is printed."""
        if not self.config.get("subcommand"):
            return
        arguments = self.config[self.config["subcommand"]]
        path = arguments.get("ckpt_path")
        if path == "last":
            path = arguments["ckpt_path"] = self._newest_checkpoint(arguments)
        if path is None and self.config["subcommand"] != "fit":
            raise ValueError("ckpt_path is not given, and an untrained model is not worth it; wanted --ckpt_path FILE")
        if path is None:
            return
        checkpoint = read_checkpoint(path)
        saved, name = checkpoint["hyper_parameters"], class_of(checkpoint)
        given = arguments["model"].get("init_args", {})
        class_path = arguments["model"]["class_path"]
        if class_path.rpartition(".")[2] != name:
            say(f"{path} is of models.{name}, which replaces {class_path}")
            class_path, given = f"models.{name}", saved
        for key, value in flat(saved).items():
            was = flat(given).get(key)
            if (list(was) if isinstance(was, tuple) else was) != value:
                say(f"{path} was made with {key}={value}, which replaces {was}")
        model = {"class_path": class_path, "init_args": saved}
        self.config = self.parser.parse_object({self.config["subcommand"]: {"model": model}}, self.config)

    def _newest_checkpoint(self, arguments: Any) -> str | None:
        """What `--ckpt_path last` means: the newest whole checkpoint of the runs in the root folder, if any."""
        folders = list(Path(arguments["trainer"]["default_root_dir"]).glob("**/checkpoints"))
        if arguments.get("last_checkpoint", {}).get("dirpath"):
            folders.append(Path(arguments["last_checkpoint"]["dirpath"]))
        found = newest_checkpoint(path for folder in folders for path in folder.glob("*.ckpt"))
        root = arguments["trainer"]["default_root_dir"]
        say(f"goes on from {found}" if found else f"no checkpoint in {root} to go on from: begins anew")
        return None if found is None else str(found)

    def after_fit(self) -> None:
        """Says what was reached and where it lies."""
        report_run(self.trainer, self.model)


def find_class(path: str) -> type:
    """The class that a configuration names by its module and its name."""
    module, _, name = path.rpartition(".")
    found: type = getattr(import_module(module), name)
    return found


def flat(arguments: Namespace | dict[str, Any]) -> dict[str, Any]:
    """A model's arguments, those in groups as group.name."""
    plain = arguments.as_dict() if isinstance(arguments, Namespace) else arguments
    found: dict[str, Any] = {}
    for name, value in plain.items():
        fields = {f"{name}.{field}": entry for field, entry in value.items()} if isinstance(value, dict) else None
        found |= {name: value} if fields is None else fields
    return found


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


@rank_zero_only
def say(line: str) -> None:
    """Prints a line, in the first process."""
    print(line, flush=True)  # noqa: T201


def _silence_lightning() -> None:
    """Advertisements, and warnings of Lightning's about its own insides."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda record: "Tip:" not in record.msg)
    for message in (
        ".*LeafSpec.*",
        ".*does not have many workers.*",
        ".*The dirpath has changed from.*",
        ".*has `__len__` defined.*",
    ):
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
