"""A folder of a model is written whole or not at all, and read as it was or refused in one sentence."""

import os
import random
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lin_attn.data.tokenizer import ByteTokenizer
from models import CausalLM, from_pretrained
from models.pretrained import folder
from tests.models.pretrained_models import TINY, build, change, outputs, replace, resign, subwords


@pytest.fixture
def saved(tmp_path):
    build(tokenizer=ByteTokenizer()).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


# Writing


def test_nothing_is_overwritten_unasked_and_nothing_but_a_model_ever(saved):
    before = (saved / "SHA256SUMS").read_text()
    model = build()
    with torch.no_grad():
        model.network.embedding.weight.add_(1)
    with pytest.raises(ValueError, match="has files already"):
        model.save_pretrained(saved)
    (saved / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"notes\.txt"):
        model.save_pretrained(saved, overwrite=True)
    assert (saved / "SHA256SUMS").read_text() == before
    (saved / "notes.txt").unlink()
    model.save_pretrained(saved, overwrite=True)
    assert torch.equal(outputs(from_pretrained(saved)), outputs(model))
    assert [path.name for path in saved.parent.iterdir()] == ["model"]
    with pytest.raises(ValueError, match="is a file"):
        model.save_pretrained(saved / "README.md")
    (empty := saved.parent / "empty").mkdir()
    model.save_pretrained(empty)


@pytest.mark.parametrize("place", ["folder.save_file", "os.fsync", "os.replace", "Path.write_text"])
def test_whatever_fails_on_the_way_the_folder_before_stays(saved, monkeypatch, place):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}

    def fail(*_, **__):
        raise OSError(28, os.strerror(28))

    place = "models.pretrained.weights.save_file" if place == "folder.save_file" else place
    with monkeypatch.context() as patch:
        patch.setattr(f"pathlib.{place}" if place.startswith("Path") else place, fail)
        with pytest.raises(OSError, match=rf"cannot write the model's folder {re.escape(str(saved))}: No space"):
            build().save_pretrained(saved, overwrite=True)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert [path.name for path in saved.parent.iterdir()] == ["model"]


def test_a_folder_that_was_moved_aside_comes_back_if_the_new_one_cannot_take_its_place(saved, monkeypatch):
    before, rename = (saved / "SHA256SUMS").read_text(), os.replace

    def fail_for_the_new_one(source, target):
        if Path(source).name == ".model.tmp":
            raise OSError(28, os.strerror(28))
        rename(source, target)

    monkeypatch.setattr("os.replace", fail_for_the_new_one)
    with pytest.raises(OSError, match="No space"):
        build("masked").save_pretrained(saved, overwrite=True)
    assert (saved / "SHA256SUMS").read_text() == before
    assert [path.name for path in saved.parent.iterdir()] == ["model"]


def test_a_process_killed_on_the_way_leaves_no_half_of_a_folder(saved):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    for target in (saved, saved.parent / "new"):
        if (process := os.fork()) == 0:
            try:
                os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
                build().save_pretrained(target, overwrite=True)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert not (saved.parent / "new").exists()
    from_pretrained(saved).save_pretrained(saved.parent / "new")
    assert {path.name for path in saved.parent.iterdir()} == {"model", "new", ".model.tmp"}


def test_what_could_not_be_found_again_is_not_written(tmp_path):
    class Mine(CausalLM):
        pass

    with pytest.raises(ValueError, match="is a Mine"):
        Mine(network=TINY).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="dtype"):
        build().save_pretrained(tmp_path / "model", dtype=torch.int8)
    with pytest.raises(ValueError, match="not whole in this process"):
        build().to("meta").save_pretrained(tmp_path / "model")
    mixed = build()
    mixed.network.blocks.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"torch\.bfloat16 and torch\.float32"):
        mixed.save_pretrained(tmp_path / "model")
    assert not list(tmp_path.iterdir())


# Damage


def damaged(data, dice):
    """The bytes with a bit flipped, some cut off or out, or some put in."""
    place, what = dice.randrange(len(data)), dice.choice(["flip", "cut end", "cut out", "insert", "digit"])
    if what == "flip":
        return data[:place] + bytes([data[place] ^ (1 << dice.randrange(8))]) + data[place + 1 :]
    if what == "cut end":
        return data[:place]
    if what == "cut out":
        return data[:place] + data[place + dice.randint(1, 9) :]
    if what == "insert":
        return data[:place] + dice.randbytes(dice.randint(1, 9)) + data[place:]
    place = dice.choice([i for i, byte in enumerate(data) if chr(byte) in "0123456789"] or [place])
    return data[:place] + str(dice.randrange(10)).encode() + data[place + 1 :]


@pytest.mark.parametrize("signed", [False, True], ids=["damaged", "damaged-before-the-checksums"])
def test_a_damaged_folder_loads_right_or_is_refused_in_one_sentence(signed, tmp_path):
    model = build(tokenizer=subwords())
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    model.save_pretrained(whole)
    shutil.copytree(whole, hurt)
    wanted, dice = outputs(model), random.Random(0)
    names = [name for name in folder.FILES if name not in ("README.md", *(["SHA256SUMS"] if signed else []))]
    refused = 0
    for _ in range(200 if signed else 1000):
        name = dice.choice(names)
        data = (whole / name).read_bytes()
        replace(hurt / name, new := damaged(data, dice))
        if signed:
            resign(hurt)
        try:
            loaded = from_pretrained(hurt)
        except ValueError as error:
            refused += 1
            clear = type(error) is ValueError and str(hurt) in str(error)
            assert clear, error  # noqa: PT017, anything but a ValueError ends the test
        else:
            assert signed or (new == data and torch.equal(outputs(loaded), wanted))
        replace(hurt / name, data)
        if signed:
            resign(hurt)
    assert refused > (70 if signed else 900)


def test_a_digit_changed_in_the_configuration_is_seen(saved):
    text = (saved / "config.json").read_text()
    (saved / "config.json").write_text(text.replace('"rope_base": 10000.0', '"rope_base": 10010.0'))
    with pytest.raises(ValueError, match=r"config\.json is damaged: its SHA-256"):
        from_pretrained(saved)


def test_the_checksums_are_those_of_sha256sum(saved):
    subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=saved, check=True, capture_output=True)


TENSOR = "network.blocks.0.attention.query.weight"


@pytest.mark.parametrize("what", ["missing", "renamed", "extra", "transposed", "dtype", "integers", "cut", "tied"])
def test_weights_that_do_not_fit_are_refused_by_name(what, tmp_path):
    build("causal untied" if what != "tied" else "causal").save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors, name = load_file(path), TENSOR.replace("query", "key")  # (4, 8)
    if what in ("missing", "renamed"):
        tensor = tensors.pop(name)
        if what == "renamed":
            tensors[name + "s"] = tensor
    elif what == "extra":
        tensors["network.extra"] = torch.zeros(2)
    elif what == "transposed":
        tensors[name] = tensors[name].T.contiguous()
    elif what == "dtype":
        tensors[name] = tensors[name].half()
    elif what == "integers":
        tensors[name] = tensors[name].long()
    elif what == "tied":
        tensors["network.head.weight"] = tensors["network.embedding.weight"].clone()
    save_file(tensors, path)
    if what == "cut":
        path.write_bytes(path.read_bytes()[:-3])
    resign(tmp_path / "model")
    told = {
        "missing": f"lacks {name}",
        "renamed": f"lacks {name} and has {name}s besides",
        "extra": "network.extra besides",
        "transposed": f"{name} has shape (8, 4); wanted (4, 8)",
        "dtype": f"{name} is float16; wanted float32",
        "integers": f"{name} is I64",
        "cut": "no whole safetensors file",
        "tied": "network.head.weight besides",
    }[what]
    with pytest.raises(ValueError, match=re.escape(told)) as error:
        from_pretrained(tmp_path / "model")
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"format_version": 2}, "format_version 2, and this lin-attn reads 1"),
        ({"format_version": "1"}, "format_version '1'"),
        ({"format_version": ...}, "format_version None"),
        ({"class": "Trainer"}, "class is 'Trainer'"),
        ({"class": "MaskedLM"}, "does not fit its config.json"),
        ({"license": "mit"}, "unknown fields license"),
        ({"options": ...}, "no options"),
        ({"options": {"n_classes": 3}}, "unknown fields n_classes"),
        ({"options": {"torch_compile": True}}, "unknown fields torch_compile"),
        ({"network": TINY | {"d_modle": 8}}, "network has unknown fields d_modle"),
        ({"network": TINY | {"n_layers": 2}}, "lacks network.blocks.1"),
        ({"network": TINY | {"n_layers": 10**9}}, "n_layers is 1000000000"),
        ({"network": TINY | {"d_model": "8"}}, "describes no model"),
        ({"network": []}, "network is []"),
        ({"optimizer": {"lr": -1}}, "optimizer.lr is -1"),
        ({"tokenizer": "words"}, "tokenizer is 'words'"),
        ({"tokenizer": "tokenizers"}, "wanted config.json, model.safetensors, tokenizer.json"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"dtype": "bfloat16"}, "is float32; wanted bfloat16"),
    ],
    ids=str,
)
def test_a_configuration_that_says_something_else_is_refused(saved, fields, told):
    change(saved, **fields)
    with pytest.raises(ValueError, match=re.escape(told)):
        from_pretrained(saved)


def test_what_is_no_folder_of_a_model_is_refused_by_name(saved, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "text.txt").write_text("hello")
    for name in ("config.json", "model.safetensors", "SHA256SUMS"):
        (copy := tmp_path / f"without-{name}").mkdir()
        for path in saved.iterdir():
            if path.name != name:
                shutil.copy(path, copy)
        with pytest.raises(ValueError, match=name):
            from_pretrained(copy)
    with pytest.raises(ValueError, match=r"other is no folder of a model"):
        from_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"no folder .*text\.txt"):
        from_pretrained(tmp_path / "text.txt")
