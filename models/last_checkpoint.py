"""The newest state of a run, always on disk: every so many steps, at the end, and before a signal ends the run.

CHECKPOINTS/last.ckpt is the newest, previous.ckpt the one before it.
"""

import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

from models.checkpoint_io import keep_as

PREVIOUS = "previous.ckpt"
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class LastCheckpoint(ModelCheckpoint):
    """Saves last.ckpt every so many steps, at the end of training, and when SIGTERM or Ctrl-C ask for an end.

    A signal is waited with until the batch at hand is done, in every process, whichever of them got it: what is saved
    then is exact, also in the middle of a step of several batches. A second Ctrl-C ends the run at once.

    Args:
        every_n_train_steps: steps between two saves, at least 1.
        dirpath: folder; by default `checkpoints` in the run's.

    Raises:
        ValueError: if every_n_train_steps is below 1.
    """

    def __init__(self, every_n_train_steps: int = 200, dirpath: str | None = None) -> None:
        if every_n_train_steps < 1:
            raise ValueError(f"every_n_train_steps is {every_n_train_steps}; wanted at least 1")
        super().__init__(
            dirpath,
            save_top_k=0,
            save_last=True,
            every_n_train_steps=every_n_train_steps,
            enable_version_counter=False,
        )
        self._interval = every_n_train_steps
        self._signal: signal.Signals | None = None
        self._handlers: dict[signal.Signals, Any] = {}
        self._due = False
        self.ended_by: signal.Signals | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins to listen for signals; what a run has resumed is saved already."""
        super().on_train_start(trainer, pl_module)
        self._signal, self._due = None, False
        self._last_global_step_saved = trainer.global_step
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._note) for number in SIGNALS}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Saves at the interval, after the last step, and when asked to end; where validation follows, after it too.

        A run that goes on from before a validation would leave it out, so a save that can wait for it does.
        """
        step = trainer.global_step
        self._due |= step != self._last_global_step_saved and (step % self._interval == 0 or step == trainer.max_steps)
        asked, validates = self._is_asked_to_end(trainer), _validation_follows(trainer)
        if asked or (self._due and not validates):
            self._save(trainer)
        if asked and not validates:
            self._end(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves what waited for it."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        asked = self._is_asked_to_end(trainer)
        if asked or self._due:
            self._save(trainer)
        if asked:
            self._end(trainer)

    def on_train_epoch_end(self, *_: Any) -> None:
        """Epochs are nothing to it."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the last state, if the run ended between two saves."""
        if trainer.global_step != self._last_global_step_saved:
            self._save(trainer)
        self._stop_listening()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Listens no longer; after an error there is nothing to save that would be worth it.

        A run that a signal ended exits as the shell has it: 128 and the signal's number, in the first process alone,
        since Lightning's launcher takes another's status for a crash.
        """
        self._stop_listening()
        if isinstance(exception, SIGTERMException) and self.ended_by is not None and trainer.is_global_zero:
            exception.code = 128 + self.ended_by

    def _save(self, trainer: Trainer) -> None:
        self._due = False
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if trainer.is_global_zero and Path(filepath).is_file():
            keep_as(Path(filepath), PREVIOUS)
        super()._save_checkpoint(trainer, filepath)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = signal.Signals(number)

    def _is_asked_to_end(self, trainer: Trainer) -> bool:
        """Whether any process was; all have to ask."""
        return trainer.strategy.reduce_boolean_decision(self._signal is not None, all=False)

    def _end(self, trainer: Trainer) -> None:
        """Lets Lightning end the run when it is through with the batch and its logs, by a SIGTERMException."""
        name = "a signal in another process" if self._signal is None else self._signal.name
        _say(f"stopped by {name} at step {trainer.global_step}; saved {self.last_model_path}, go on with --ckpt_path")
        trainer._signal_connector.received_sigterm = True
        self.ended_by = self._signal or signal.SIGTERM

    def _stop_listening(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}


@rank_zero_only
def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)  # noqa: T201


def _validation_follows(trainer: Trainer) -> bool:
    loop = trainer.fit_loop
    assert loop._data_fetcher is not None
    return bool(trainer.enable_validation and loop.epoch_loop._should_check_val_fx(loop._data_fetcher))
