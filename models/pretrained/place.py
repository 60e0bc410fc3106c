"""A folder that appears at once: written beside its place, brought to the disk, and renamed into it."""

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from models.checkpoint_io import CheckpointWriteError, sync_folder


@contextmanager
def new_folder(folder: Path, *, overwrite: bool, known: Collection[str]) -> Iterator[Path]:
    """A folder beside another's place to write files into, which is brought to the disk and renamed to it in the end.

    Args:
        folder: the place.
        overwrite: replace what is there, if it has no other files than the known ones.
        known: names of files that may be replaced.

    Raises:
        ValueError: if there are files that are not to be replaced.
        CheckpointWriteError: if writing failed; what was there before is as it was.
    """
    _check_place(folder, overwrite, known)
    aside = folder.with_name(f".{folder.name}.tmp")  # one name a target: the next writes over what was left behind
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        for path in aside.iterdir():
            path.chmod(aside.stat().st_mode & 0o666)  # safetensors lets none but the user read what it writes
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        _put_in_place(aside, folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointWriteError(f"cannot write the model's folder {folder}: {reason}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _check_place(folder: Path, overwrite: bool, known: Collection[str]) -> None:
    """Only what save_pretrained wrote is ever replaced."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file; wanted a folder, new or empty")
    here = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if here and not overwrite:
        raise ValueError(f"{folder} has files already; wanted a new or empty folder, or overwrite=True")
    others = [name for name in here if name not in known]
    if others:
        raise ValueError(
            f"{folder} holds {others[0]!r}, no part of a saved model; wanted a folder of save_pretrained alone"
        )


def _put_in_place(aside: Path, folder: Path) -> None:
    """Renames a whole folder to its place; what was there goes only then.

    No system renames a folder over another that has files: a process killed between the two renames leaves the old one
    under the name .NAME.old.
    """
    before = folder.with_name(f".{folder.name}.old")
    if folder.exists():
        shutil.rmtree(before, ignore_errors=True)
        os.replace(folder, before)
    try:
        os.replace(aside, folder)
    except OSError:
        with suppress(OSError):
            os.replace(before, folder)
        raise
    sync_folder(folder.parent)
    shutil.rmtree(before, ignore_errors=True)
