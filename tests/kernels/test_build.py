"""The kernel is built once and kept; where it cannot be built, all still works, and one warning says what to do."""

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from lin_attn import linear_attention
from lin_attn.kernels.cpu import build, calls, library
from lin_attn.ops.backends import usable_backends
from tests.helpers import relative


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and nothing loaded."""
    whole = build.build()
    folder = tmp_path / "cache"
    monkeypatch.setenv("LIN_ATTN_CACHE", str(folder))
    monkeypatch.delenv("LIN_ATTN_BACKEND", raising=False)
    (tmp_path / "whole.so").write_bytes(whole.read_bytes())
    library.load.cache_clear(), library.unusable.cache_clear()
    yield folder / "kernels"
    library.load.cache_clear(), library.unusable.cache_clear()


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Makes CXX a script that notes each call and hands out a finished kernel, after `first` was run."""

    def install(first: str = "", version: str = "1.0") -> Path:
        notes, script = tmp_path / "calls", tmp_path / "compiler"
        notes.touch()
        script.write_text(
            f'#!/bin/sh\ncase "$*" in --version) echo compiler {version}; exit;; esac\necho "$@" >> {notes}\n'
            f'{first}\nfor last; do :; done\ncp {tmp_path / "whole.so"} "$last"\n'
        )
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return notes

    return install


def compilations(notes: Path) -> list[str]:
    """How the compiler was called for one of the source files, which stands for all."""
    return [line for line in notes.read_text().splitlines() if f"{build.SOURCES}/linear_attention.cpp" in line]


def attention(**options):
    x = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    return linear_attention(x, x, x, **options)


def test_the_second_build_is_the_first_ones_file(compiler, cache):
    notes = compiler()
    path = build.build()
    assert path.parent == cache
    assert build.build() == path
    assert len(compilations(notes)) == 1
    assert [file.name for file in cache.iterdir()] == [path.name], "nothing else is left behind"
    assert relative(attention(backend="cpu"), attention(backend="reference")) <= 1e-5
    assert str(path) in library.describe()


@pytest.mark.slow
def test_the_real_compiler_makes_a_kernel_that_works_within_a_minute(cache):
    """It takes some 10 s of a processor; the time that subprocesses took is measured, not what they waited."""
    before = os.times()
    path = build.build()
    after = os.times()
    assert path.parent == cache
    assert after.children_user - before.children_user < 60
    assert relative(attention(backend="cpu"), attention(backend="reference")) <= 1e-5


@pytest.mark.parametrize("reason", ["there is none", "it fails", "it cannot be run", "it takes too long"])
def test_without_a_kernel_one_warning_says_why_and_what_to_do(reason, compiler, monkeypatch):
    words = {
        "there is none": "no C++ compiler: looked for no-such-compiler",
        "it fails": "internal error: 7",
        "it cannot be run": "--version failed",
        "it takes too long": "timed out",
    }[reason]
    if reason == "there is none":
        monkeypatch.setenv("CXX", "no-such-compiler")
    elif reason == "it cannot be run":
        compiler()
        Path(os.environ["CXX"]).write_text("#!/no/such/interpreter\n")
    elif reason == "it takes too long":
        compiler("exec sleep 60")
        monkeypatch.setattr(build, "TIMEOUT", 0.5)
    else:
        compiler('echo "a note" >&2; echo "internal error: 7" >&2; exit 1')
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outs = [attention() for _ in range(3)]
    assert relative(outs[0], attention(backend="chunked")) == 0
    assert len(caught) == 1
    message = str(caught[0].message)
    assert words in message
    assert "\n" not in message
    assert "CXX" in message
    assert "LIN_ATTN_BACKEND=chunked" in message
    assert words in usable_backends()["cpu"]
    assert words in library.describe()
    with pytest.raises(ValueError, match="backend 'cpu' cannot compute this"):
        attention(backend="cpu")


def test_a_backend_named_in_the_environment_builds_nothing(compiler, monkeypatch):
    notes = compiler()
    monkeypatch.setenv("LIN_ATTN_BACKEND", "chunked")
    attention()
    assert not compilations(notes)


def test_a_compiler_that_does_not_know_the_processor_compiles_for_any(compiler):
    notes = compiler('case "$*" in *native*) echo "error: unknown processor" >&2; exit 1;; esac')
    path = build.build()
    assert ["native" in line for line in compilations(notes)] == [True, False]
    assert build._is_whole(path)


@pytest.mark.parametrize("obstacle", ["a file stands there", "nobody may write there"])
def test_a_cache_that_cannot_be_written_to_is_done_without(obstacle, compiler, tmp_path, monkeypatch):
    """Root may write anywhere but into /proc."""
    compiler()
    place = "/proc/self/lin_attn" if obstacle == "nobody may write there" else str(tmp_path / "file")
    (tmp_path / "file").touch()
    monkeypatch.setenv("LIN_ATTN_CACHE", place)
    path = build.build()
    assert build._is_whole(path)
    assert relative(attention(backend="cpu"), attention(backend="reference")) <= 1e-5
    shutil.rmtree(path.parent)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_full_disk_is_no_crash(moment, compiler, monkeypatch):
    """Found before compiling it is a reason to build elsewhere, and after it a reason to go without."""
    compiler()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((build.tempfile, "NamedTemporaryFile") if moment == "before" else (os, "replace")), full)
    loaded = library.load()
    assert ("No space left" in loaded) if moment == "after" else not isinstance(loaded, str)


@pytest.mark.parametrize("damage", ["cut short", "empty", "a bit changed", "another file"])
def test_a_damaged_file_in_the_cache_is_built_anew(damage, compiler):
    notes = compiler()
    path = build.build()
    content = path.read_bytes()
    changed = bytearray(content)
    changed[len(changed) // 2] ^= 1
    path.write_bytes(
        {"cut short": content[:-5000], "empty": b"", "a bit changed": bytes(changed), "another file": b"x" * 99}[damage]
    )
    assert build.build() == path
    assert len(compilations(notes)) == 2
    assert path.read_bytes() == content
    assert relative(attention(backend="cpu"), attention(backend="reference")) <= 1e-5


@pytest.mark.slow
def test_processes_that_build_at_once_all_get_a_whole_kernel(compiler, cache):
    notes = compiler("sleep 1")
    code = "from lin_attn.kernels.cpu import build, library; p = build.build(); assert build._is_whole(p); print(p)"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(paths) == 1
    assert compilations(notes)
    assert [str(file) for file in cache.iterdir()] == list(paths)


@pytest.mark.parametrize("what", ["source", "a header", "flags", "compiler", "processor"])
def test_a_kernel_of_another_origin_is_another_file(what, compiler, tmp_path, monkeypatch):
    compiler()
    first = build.build()
    if what in ("source", "a header"):
        sources = tmp_path / "csrc"
        shutil.copytree(build.SOURCES, sources)
        with (sources / ("linear_attention.cpp" if what == "source" else "rows.h")).open("a") as file:
            file.write("\n")
        monkeypatch.setattr(build, "SOURCES", sources)
    elif what == "flags":
        monkeypatch.setattr(build, "FLAGS", [*build.FLAGS, "-DX"])
    elif what == "compiler":
        compiler(version="2.0")
    else:
        monkeypatch.setattr(build, "processor", lambda: "another")
    assert build.build().name != first.name


def test_a_library_that_describes_another_problem_is_refused(compiler, monkeypatch):
    """A field added on one side only would shift all that follow."""
    compiler()
    monkeypatch.setattr(library, "Problem", calls.TensorView)
    assert "describe different problems" in library.load()


FORK = """
import os, torch
from lin_attn import linear_attention
from lin_attn.kernels.cpu import calls
calls._SMALL = 0
torch.set_num_threads(2)
x = torch.randn(2, 4, 200, 16, requires_grad=True)
wanted = linear_attention(x, x, x, backend="cpu")
wanted.sum().backward()
child = os.fork()
if child == 0:  # as a worker of a DataLoader starts
    torch.set_num_threads(1)
    out = linear_attention(x, x, x, backend="cpu")
    out.sum().backward()
    os._exit(0 if torch.allclose(out, wanted, atol=1e-5) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_goes_on_with_one_thread(monkeypatch):
    """OpenMP's threads do not survive a fork: a child that waited for them would wait for ever."""
    monkeypatch.delenv("LIN_ATTN_CACHE")
    said = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120, check=True)
    assert said.stdout.split() == ["0"]
