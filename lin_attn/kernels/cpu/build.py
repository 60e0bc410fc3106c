"""Compiles the kernel for the processor at hand, once, and keeps it in the user's cache.

The file's name is a hash of what it is made from: sources, flags, compiler and processor. It is written beside its
place and renamed into it, so that processes that build at the same time do not see each other's halves. It ends with a
hash of itself, since a library that was cut short can bring down the process that loads it.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
TIMEOUT = 300  # seconds; a build takes a few
# Multiplications and additions are fused where the processor can; NaN and infinity keep their meaning.
FLAGS = [
    "-std=c++17",
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    # What is worth a vector is written as one; looking for more takes a third of the time of a build.
    "-fno-tree-vectorize",
    "-fno-tree-slp-vectorize",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
]


class BuildError(RuntimeError):
    """There is no kernel; the message says why and what to do."""


def cache_dir() -> Path:
    """$LIN_ATTN_CACHE/kernels, else in $XDG_CACHE_HOME/lin_attn, else in ~/.cache/lin_attn."""
    chosen = os.environ.get("LIN_ATTN_CACHE")
    parent = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return Path(chosen or os.path.join(parent, "lin_attn")).expanduser() / "kernels"


def build() -> Path:
    """The compiled library: the cached one, or a new one, in a temporary folder where the cache cannot be written to.

    Raises:
        BuildError: if there is no compiler, or none that can compile it.
    """
    compiler, version = find_compiler()
    failures = []
    for target in target_flags():
        flags = [*FLAGS, *target]
        name = f"linear_attention-{_key(version, flags)}.so"
        cached = cache_dir() / name
        if _is_whole(cached):
            return cached
        try:
            folder = _writable(cache_dir())
            scratch = Path(tempfile.mkdtemp(prefix="building-", dir=folder))
        except OSError as error:
            raise BuildError(f"no folder to build in: {error}") from error
        try:
            output = scratch / name
            problem = compile_sources(compiler, flags, output)
            if problem is None:
                output.write_bytes(output.read_bytes() + _digest(output.read_bytes()))
                if folder == cache_dir():
                    os.replace(output, cached)
                    return cached
                return Path(shutil.move(output, folder / name))
            failures.append(problem)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    raise BuildError(f"{compiler} failed: {failures[-1]}")


def find_compiler() -> tuple[str, str]:
    """Path of $CXX, c++, g++ or clang++, the first that there is, and what it says of its version.

    Raises:
        BuildError: if there is none.
    """
    chosen = os.environ.get("CXX")
    names = [chosen] if chosen else ["c++", "g++", "clang++"]
    for name in names:
        path = shutil.which(name)
        if path is not None:
            try:
                said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=TIMEOUT, check=True)
            except (OSError, subprocess.SubprocessError) as error:
                raise BuildError(f"{path} --version failed: {error}") from error
            return path, said.stdout
    raise BuildError(f"no C++ compiler: looked for {', '.join(names)}")


def target_flags() -> list[list[str]]:
    """For this processor; then for any of its kind, should the compiler not know it."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return [["-mcpu=native"], []]
    # GCC and Clang would rather split vectors of 512 bits, for processors that slow down for them.
    return [["-march=native", "-mprefer-vector-width=512"], []]


def processor() -> str:
    """The processor's name and what it can do: a library for another could stop at an unknown instruction."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _key(compiler: str, flags: list[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update("\0".join([compiler, *flags, processor()]).encode())
    return digest.hexdigest()


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=32).digest()


def _is_whole(library: Path) -> bool:
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return content[-32:] == _digest(content[:-32])


def _writable(folder: Path) -> Path:
    """The folder, made if it is not there, or a new temporary one if it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 20))  # about what a library takes
            file.flush()
        return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="lin-attn-kernel-"))


def compile_sources(compiler: str, flags: list[str], output: Path) -> str | None:
    """Makes the library, files side by side, and objects beside it. None, or what went wrong in a line."""
    objects = {source: output.with_name(f"{source.stem}.o") for source in sorted(SOURCES.glob("*.cpp"))}
    commands = [[compiler, *flags, "-c", str(source), "-o", str(target)] for source, target in objects.items()]
    link = [compiler, *flags, "-shared", *map(str, objects.values()), "-o", str(output)]
    return _run(commands) or _run([link])


def _run(commands: list[list[str]]) -> str | None:
    """Runs them side by side. None, or what went wrong in a line."""
    running: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
        said = [process.communicate(timeout=TIMEOUT)[1] for process in running]
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.communicate()
    for process, stderr in zip(running, said, strict=True):
        if process.returncode != 0:
            lines = stderr.splitlines()
            errors = [line for line in lines if "error" in line] or lines
            return errors[0] if errors else f"exit status {process.returncode}"
    return None
