"""A checkpoint's file is whole or not there; what cannot be written or read is told by name."""

import errno
import os
import re
import resource
import signal

import pytest
import torch
from lightning.pytorch import Trainer

from models import CausalLM
from models.checkpoint import newest_checkpoint, read_checkpoint
from models.checkpoint_io import AtomicCheckpointIO, CheckpointWriteError, keep_as
from tests.models.runs import in_processes


@pytest.fixture
def saved(tmp_path):
    """Two checkpoints of a run, the older one first."""
    model = CausalLM(network={"d_model": 16, "n_layers": 1, "n_heads": 2})
    trainer = Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path, plugins=[AtomicCheckpointIO()])
    trainer.strategy.connect(model)
    paths = [tmp_path / "version_0" / "checkpoints" / name for name in ("previous.ckpt", "last.ckpt")]
    for age, path in zip((100, 50), paths, strict=True):
        trainer.save_checkpoint(path)
        os.utime(path, (path.stat().st_atime - age, path.stat().st_mtime - age))
    return paths


@pytest.mark.parametrize("damage", ["truncated", "text", "empty", "foreign"])
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_offered(saved, damage):
    previous, last = saved
    if damage == "foreign":
        torch.save({"weights": torch.zeros(3)}, last)
    else:
        whole = last.read_bytes()
        last.write_bytes({"truncated": whole[: len(whole) // 2], "text": b"hello", "empty": b""}[damage])
    for read in (read_checkpoint, AtomicCheckpointIO().load_checkpoint):
        with pytest.raises(ValueError, match=r"last\.ckpt") as error:
            read(last)
        assert str(previous) in str(error.value)
    assert newest_checkpoint(saved) == previous
    (other := previous.parents[2] / "version_1" / "checkpoints").mkdir(parents=True)
    previous.rename(other / "last.ckpt")
    with pytest.raises(ValueError, match=re.escape(str(other / "last.ckpt"))):  # that of an earlier run
        read_checkpoint(last)


def test_where_all_are_damaged_none_is_offered(saved):
    for path in saved:
        path.write_bytes(b"hello")
    with pytest.raises(ValueError, match="truncated") as error:
        read_checkpoint(saved[1])
    assert "go back" not in str(error.value)


def _fill(path):
    """Writes 8 MB where a file may have 1 MB, as on a disk that becomes full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    try:
        AtomicCheckpointIO().save_checkpoint({"state_dict": torch.zeros(1 << 21)}, path)
    except CheckpointWriteError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        path.with_name("error").write_text(str(error))


def test_a_full_disk_leaves_the_last_good_checkpoint_and_says_what_is_wrong(saved, tmp_path):
    last = saved[1]
    before = last.read_bytes()
    assert in_processes(_fill, last, log=tmp_path / "log") == [0]
    assert last.read_bytes() == before
    assert {path.name for path in last.parent.iterdir()} == {"last.ckpt", "previous.ckpt", "error"}
    message = last.with_name("error").read_text()
    assert str(last) in message
    assert os.strerror(errno.EFBIG) in message
    assert "still holds the checkpoint before" in message


@pytest.mark.parametrize("when", ["writing", "syncing", "renaming"])
def test_whatever_fails_on_the_way_the_old_file_stays(saved, monkeypatch, when):
    last = saved[1]
    before = last.read_bytes()

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    place = {"writing": "torch.save", "syncing": "os.fsync", "renaming": "os.replace"}[when]
    monkeypatch.setattr(f"models.checkpoint_io.{place}", fail)
    with pytest.raises(CheckpointWriteError, match="No space left on device"):
        AtomicCheckpointIO().save_checkpoint({}, last)
    assert last.read_bytes() == before
    assert not list(last.parent.glob(".*"))


@pytest.mark.parametrize("links", [True, False])
def test_the_checkpoint_before_is_kept_when_another_takes_its_place(saved, monkeypatch, links):
    last = saved[1]
    before = last.read_bytes()
    if not links:
        monkeypatch.setattr("models.checkpoint_io.os.link", lambda *_: (_ for _ in ()).throw(OSError()))
    keep_as(last, "previous.ckpt")
    AtomicCheckpointIO().save_checkpoint({"new": 1}, last)
    assert saved[0].read_bytes() == before
    assert torch.load(last, weights_only=True) == {"new": 1}
