"""From a path, a folder, a glob or "stdlib" to a sorted list of named files.

A file's name is its posix path relative to the folder that was asked for. Splits hash names, so where the
folder lies does not matter.
"""

import glob
import os
import re
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass

STDLIB = "stdlib"
# Tests are most of the standard library's bytes and little like its code; the rest is not the library.
STDLIB_SKIPPED = {"test", "tests", "idlelib", "__pycache__", "site-packages", "dist-packages"}


@dataclass(frozen=True)
class SourceFile:
    """One file to read.

    Attributes:
        path: Where it is.
        name: Posix path relative to the folder asked for.
        explicit: Named by a path or a glob, and so not to be skipped when it is no text.
    """

    path: str
    name: str
    explicit: bool


def find_files(spec: str) -> list[SourceFile]:
    """Lists the files that a source names.

    Folders are walked recursively, links followed; hidden files and folders are left out.

    Args:
        spec: "stdlib", a file, a folder, or a glob (`**` matches any depth).

    Returns:
        The files, sorted by name.

    Raises:
        ValueError: Nothing is there, a link is dangling, or a named path is neither file nor folder.
    """
    if spec == STDLIB:
        folder = sysconfig.get_path("stdlib")
        files = [file for file in _walk(folder, STDLIB_SKIPPED) if file.name.endswith(".py")]
        wanted = f"*.py files of the Python standard library in {folder}"
    else:
        path = os.path.expanduser(spec)
        # A path that exists is a path, even with brackets in its name.
        if os.path.lexists(path) or not glob.has_magic(path):
            files = _from_path(path)
            wanted = f"files in the folder {path!r} (hidden ones do not count)"
        else:
            files = _from_glob(path)
            wanted = f"files matching the glob {path!r} (** matches folders of any depth)"
    if not files:
        raise ValueError(f"source {spec!r}: found nothing, wanted {wanted}")
    return sorted(files, key=lambda file: file.name)


def _from_path(path: str) -> list[SourceFile]:
    mode = _mode(path)
    if stat.S_ISDIR(mode):
        return list(_walk(path, skipped=set()))
    if not stat.S_ISREG(mode):
        raise ValueError(f"source {path!r} is neither a file nor a folder")
    return [SourceFile(path, os.path.basename(path), explicit=True)]


def _from_glob(pattern: str) -> list[SourceFile]:
    folder = os.path.dirname(pattern[: re.search(r"[*?[]", pattern).start()])  # type: ignore[union-attr]
    matches = glob.glob(pattern, recursive=True)
    paths = [path for path in matches if not os.path.isdir(path)]
    if matches and not paths:
        raise ValueError(f"source {pattern!r} matches only folders, wanted files: try {pattern}/**")
    for path in paths:
        if not stat.S_ISREG(_mode(path)):
            raise ValueError(f"source {pattern!r} matches {path!r}, which is neither a file nor a folder")
    return [SourceFile(path, _relative(path, folder or "."), explicit=True) for path in paths]


def _walk(folder: str, skipped: set[str]) -> Iterator[SourceFile]:
    visited: set[str] = set()
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=_raise):
        real = os.path.realpath(parent)
        if real in visited:  # a link that leads back up would never end
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        for name in sorted(names):
            path = os.path.join(parent, name)
            # Sockets and pipes are not corpora, and reading a pipe may wait for ever.
            if not name.startswith(".") and stat.S_ISREG(_mode(path)):
                yield SourceFile(path, _relative(path, folder), explicit=False)


def _raise(error: OSError) -> None:
    raise ValueError(f"cannot read the folder {error.filename!r}: {error.strerror}") from None


def _relative(path: str, folder: str) -> str:
    return os.path.relpath(path, folder).replace(os.sep, "/")


def _mode(path: str) -> int:
    try:
        return os.stat(path).st_mode
    except OSError as error:
        if os.path.islink(path):
            reason = f"it is a link to {os.readlink(path)!r}, which cannot be read ({error.strerror})"
        else:
            reason = error.strerror or str(error)
    except ValueError as error:  # a NUL in the path
        reason = str(error)
    hint = "" if os.path.lexists(path) else f"; a data set of the Hugging Face hub is written hub:{path}"
    raise ValueError(f"cannot read {path!r}: {reason}. Wanted a file, a folder or a glob{hint}")
