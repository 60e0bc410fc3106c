"""Small runs of training in processes of their own, forked from one that has imported all: real signals, real ranks.

A process of a run writes its curve as it goes: a line a step and a line a validation, with every digit.
"""

import multiprocessing
import os
import random
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging

from lin_attn.data import TextCorpus
from models import CausalLM
from models.checkpoint_io import AtomicCheckpointIO
from models.last_checkpoint import LastCheckpoint

torch.set_num_threads(1)
torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.1  # seconds until a killed process's workers notice
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.models.runs"])
NETWORK = {"d_model": 16, "n_layers": 2, "n_heads": 2}
OPTIMIZER = {"lr": 1e-2, "warmup_steps": 3}


def write_corpus(folder: Path, documents: int = 24) -> Path:
    """Documents of 60 to 180 bytes, each unlike the others."""
    letters = random.Random(0)
    folder.mkdir(parents=True)
    for i in range(documents):
        text = "".join(letters.choice("abcdefgh \n") for _ in range(60 + 5 * i))
        (folder / f"{i:02}.txt").write_text(text)
    return folder


class Recorder(Callback):
    """Appends each step's loss, with a draw of every generator, and each validation's, to a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._step = path, None

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        draws = [torch.rand(()).item(), float(np.random.random()), random.random()]
        if trainer.global_step != self._step:  # after the last batch of a step
            loss = trainer.callback_metrics["train/loss"].item()
            self._write(trainer, "step", [loss, *draws])
        self._step = trainer.global_step

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        self._step = trainer.global_step

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            names = ("loss", "perplexity", "bits_per_byte")
            self._write(trainer, "validation", [trainer.callback_metrics[f"val/{name}"].item() for name in names])

    def _write(self, trainer: Trainer, kind: str, values: list[float]) -> None:
        if trainer.is_global_zero:
            line = " ".join([kind, str(trainer.global_step), *(value.hex() for value in values)])
            with self._path.open("a") as file:
                file.write(line + "\n")


def read_curve(path: Path) -> dict[tuple[str, int], list[str]]:
    """(kind, step) → its figures; a step that was taken more than once was the same each time."""
    curve: dict[tuple[str, int], list[str]] = {}
    for line in path.read_text().splitlines():
        kind, step, *values = line.split()
        assert curve.setdefault((kind, int(step)), values) == values, f"{kind} {step} is not what it was before"
    return curve


class Kill(Callback):
    """Ends the process by SIGKILL, or another signal, in a step, at one of PLACES."""

    PLACES = ("batch start", "backward", "optimizer step", "batch end", "checkpoint", "validation")

    def __init__(self, step: int, place: str, number: int = signal.SIGKILL) -> None:
        self._step, self._place, self._number, self._sent = step, place, number, False

    def setup(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        sync = os.fsync

        def fsync(file: int) -> None:  # when the checkpoint lies beside its place
            self._reached(trainer, "checkpoint")
            sync(file)

        os.fsync = fsync

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._reached(trainer, "batch start")

    def on_after_backward(self, trainer: Trainer, *_: Any) -> None:
        self._reached(trainer, "backward")

    def on_before_zero_grad(self, trainer: Trainer, *_: Any) -> None:
        self._reached(trainer, "optimizer step")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._reached(trainer, "batch end")

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._reached(trainer, "validation")

    def _reached(self, trainer: Trainer, place: str) -> None:
        # A place that a step does not have is left for the next event.
        here = trainer.global_step == self._step and place == self._place
        if (here or trainer.global_step > self._step) and not self._sent and trainer.is_global_zero:
            self._sent = True
            os.kill(os.getpid(), self._number)


def fit(
    folder: Path,
    *,
    steps: int,
    curve: str = "curve",
    network: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    ema: float | None = None,
    kill: tuple[Any, ...] | None = None,
    every: int = 3,
    resume: Path | None = None,
    seed: int = 0,
    checkpoints: str = "checkpoints",
) -> Trainer:
    """Trains on the corpus in folder/text; leaves folder/CHECKPOINTS/last.ckpt."""
    seed_everything(seed, verbose=False)
    callbacks: list[Callback] = [Recorder(folder / curve), LastCheckpoint(every, str(folder / checkpoints))]
    if ema is not None:
        callbacks.append(EMAWeightAveraging(decay=ema))
    if kill is not None:
        callbacks.append(Kill(*kill))
    options = {
        "accelerator": "cpu",
        "devices": 1,
        "val_check_interval": 5,
        "check_val_every_n_epoch": None,
        "limit_val_batches": 2,
    }
    options |= {"precision": "32-true", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    run = Trainer(
        max_steps=steps, callbacks=callbacks, plugins=[AtomicCheckpointIO()], default_root_dir=folder,
        **options | (trainer or {}),
    )  # fmt: skip
    corpus = TextCorpus(
        str(folder / "text"), cache_dir=str(folder / "cache"),
        **{"block_length": 8, "batch_size": 4, "validation_fraction": 0.2} | (data or {}),
    )  # fmt: skip
    module = CausalLM(NETWORK | (network or {}), OPTIMIZER | {"max_steps": 60} | (optimizer or {}), **model or {})
    run.fit(module, corpus, ckpt_path=resume if resume is not None and resume.exists() else None)
    return run


def in_processes(
    function: Callable[..., Any], *args: Any, ranks: int = 1, log: Path, timeout: float = 120, **kwargs: Any
) -> list[int]:
    """Calls a function in new processes, as many as there are ranks, which torchrun could have started.

    Returns:
        Their exit codes: 0, or minus the signal that ended one.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        CONTEXT.Process(target=_call, args=(function, args, kwargs, rank, ranks, port, log)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
    codes = [process.exitcode for process in processes]
    assert 1 not in codes, log.read_text()
    return [code if code is not None else 1 for code in codes]


def _call(function: Callable[..., Any], args: Any, kwargs: Any, rank: int, ranks: int, port: int, log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1), os.dup2(file, 2)
    multiprocessing.set_start_method("fork", force=True)  # for a loader's workers
    if ranks > 1:
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test",
        }  # fmt: skip
    try:
        function(*args, **kwargs)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
