"""Writing checkpoints so that a file is always whole: aside, to the disk, and then renamed into its place."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from fsspec.utils import get_protocol  # type: ignore[import-untyped]
from lightning.pytorch.plugins.io import TorchCheckpointIO

from models.checkpoint import read_checkpoint


class CheckpointWriteError(OSError):
    """A checkpoint could not be written; what lay in its place before is as it was."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's reading and writing of checkpoints, for local files with three promises more.

    A file is written beside its place under another name, brought to the disk and renamed, so that a process killed at
    any moment, or a machine that loses power, leaves the old file or the new one; nothing is copied in memory first.
    What cannot be written raises an error that names the file and the reason. What is read is refused by name where
    it is no whole checkpoint, with the one before it.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Writes a checkpoint.

        Raises:
            CheckpointWriteError: if it could not be written.
        """
        if storage_options is not None or not _is_local(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        write_atomically(Path(path), lambda file: torch.save(checkpoint, file))

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Reads a checkpoint; only tensors and plain values are unpickled.

        Raises:
            ValueError: if it is not there, or is no whole checkpoint of a run.
        """
        if _is_local(path):
            read_checkpoint(path)
            weights_only = True
        return super().load_checkpoint(path, map_location, weights_only)


def write_atomically(path: Path, write: Callable[[Any], None]) -> None:
    """Calls write with an open binary file, whose contents are at path, whole, when this returns.

    Raises:
        CheckpointWriteError: if that failed, by a full disk for example; what was at path is as it was.
    """
    # One name a target: what a killed process leaves behind is written over by the next.
    aside = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch tells of a failed write by a RuntimeError
        with suppress(OSError):
            aside.unlink()
        reason = next((e.strerror for e in (error, error.__context__) if isinstance(e, OSError) and e.strerror), error)
        kept = f"; {path} still holds the checkpoint before" if path.exists() else ""
        raise CheckpointWriteError(f"cannot write the checkpoint {path}: {reason}{kept}") from error


def keep_as(path: Path, name: str) -> None:
    """Lets the file at path be found by another name in its folder too, after path itself is replaced."""
    aside = path.with_name(f".{name}.tmp")
    aside.unlink(missing_ok=True)
    try:
        os.link(path, aside)
    except OSError:  # a file system without hard links
        os.replace(path, aside)
    os.replace(aside, path.with_name(name))


def sync_folder(folder: Path) -> None:
    """Brings a folder's names to the disk, where the system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _is_local(path: str | Path) -> bool:
    return bool(get_protocol(str(path)) == "file")
