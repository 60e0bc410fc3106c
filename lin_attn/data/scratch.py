"""Folders to build in, which go when their process does: at its end, or when another process next builds."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator

try:
    import fcntl
except ImportError:  # Windows: what a killed build leaves is left
    fcntl = None  # type: ignore[assignment]

PREFIX = ".building-"


@contextlib.contextmanager
def scratch_folder(parent: str) -> Iterator[str]:
    """A new folder in `parent` (made if need be), removed at the end; those of processes that are gone go too.

    A build holds a lock on its folder, and the system lets go of it however the process ends; so a folder whose lock is
    free belongs to nobody.

    Raises:
        OSError: The folder cannot be made.
    """
    os.makedirs(parent, exist_ok=True)
    with contextlib.ExitStack() as held:
        # Between its making and its locking a folder must not be taken for one that was left.
        with _locked(parent) as safe:
            if safe:
                _sweep(parent)
            folder = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
            held.enter_context(_locked(folder))
        held.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


def _sweep(parent: str) -> None:
    for entry in os.scandir(parent):
        if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False):
            with contextlib.suppress(OSError), _locked(entry.path, wait=False) as free:
                if free:
                    shutil.rmtree(entry.path, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: str, *, wait: bool = True) -> Iterator[bool]:
    """Holds a folder's lock; gives False where another process has it, or the file system knows no locks."""
    if fcntl is None:
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            locked = True
        except OSError:
            locked = False
        yield locked
    finally:
        os.close(descriptor)
