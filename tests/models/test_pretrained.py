"""A pretrained model comes back as it was given, or not at all and with one sentence that says why."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from lightning.pytorch import Trainer
from safetensors.torch import load_file, save_file

import models
from lin_attn.data.bpe import train_bpe
from lin_attn.data.documents import Document
from lin_attn.data.special_tokens import SpecialTokens
from lin_attn.data.tokenizer import ByteTokenizer
from lin_attn.data.tokenizer_spec import TokenizerSpec
from lin_attn.data.words import train_words
from models import CausalLM, MaskedLM, PairRanker, Seq2Seq, SequenceClassifier, from_pretrained
from models.cli import main
from models.pretrained import checksums, folder, loading, read_config
from models.training import TrainedModel

TINY = {"vocab_size": 300, "d_model": 8, "n_layers": 1, "n_heads": 2}
MODELS = {
    "causal": (CausalLM, TINY, {}),
    "causal untied": (CausalLM, TINY | {"tie_embeddings": False, "n_kv_heads": 1, "rope_base": 500.0}, {}),
    "causal t5": (CausalLM, TINY | {"n_layers": 2, "attention": "softmax", "position": "t5"}, {}),
    "masked": (MaskedLM, TINY | {"embedding_size": 6, "n_token_types": 2, "embedding_norm": True, "bias": True}, {}),
    "masked learned": (MaskedLM, TINY | {"position": "learned", "max_length": 30}, {}),
    "masked deberta": (MaskedLM, TINY | {"n_layers": 2, "attention": "softmax", "position": "deberta"}, {}),
    "masked xl": (MaskedLM, TINY | {"attention": "softmax", "position": "transformer_xl"}, {}),
    "seq2seq": (Seq2Seq, TINY | {"source_vocab_size": 310}, {"label_smoothing": 0.1, "begin_token": 0, "end_token": 1}),
    "seq2seq narrow": (Seq2Seq, TINY | {"embedding_size": 6, "embedding_norm": True, "tie_embeddings": False}, {}),
    "causal roformer": (CausalLM, TINY | {"embedding_size": 6, "embedding_norm": True, "head": "bert"}, {}),
    "seq2seq shared": (Seq2Seq, TINY | {"n_decoder_layers": 2}, {}),
    "classifier": (SequenceClassifier, TINY, {"n_classes": 5, "pooling": "mean"}),
    "ranker": (PairRanker, TINY, {"pooler": "gelu"}),
}


def build(name="causal", tokenizer=None):
    torch.manual_seed(0)
    kind, network, options = MODELS[name]
    model = kind(network=network, optimizer={"lr": 0.5, "betas": (0.5, 0.75)}, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5)
    model.tokenizer = tokenizer
    return model.eval()


def outputs(model):
    tokens = torch.randint(300, (2, 7), generator=torch.Generator().manual_seed(1))
    return model(tokens, tokens) if isinstance(model, Seq2Seq) else model(tokens)


def subwords():
    return train_bpe([Document("a", [b"low lower lowest slow slower " * 20])], 280, end_token="<end>")


def replace(path, data):
    path.unlink()  # to write over a file is a hundred times slower where the system then waits for the disk
    path.write_bytes(data)


def resign(path):
    """Gives a folder whose files were changed the checksums of what they are now."""
    names = [line.split("  ")[1] for line in (path / "SHA256SUMS").read_text().splitlines()]
    replace(path / "SHA256SUMS", checksums.checksums(path, names).encode())


def change(path, **fields):
    """Other fields in a folder's config.json, or without those that are ..., checksums made anew."""
    config = json.loads((path / "config.json").read_text())
    config = {name: value for name, value in (config | fields).items() if value is not ...}
    (path / "config.json").write_text(json.dumps(config))
    resign(path)


@pytest.fixture
def saved(tmp_path):
    build(tokenizer=ByteTokenizer()).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", MODELS, ids=lambda name: name.replace(" ", "-"))
def test_a_model_comes_back_as_it_was(name, tmp_path):
    model = build(name, ByteTokenizer())
    model.save_pretrained(tmp_path / "model")
    random_state = torch.get_rng_state()
    loaded = from_pretrained(tmp_path / "model")
    assert torch.equal(torch.get_rng_state(), random_state)
    assert type(loaded) is type(model)
    assert not loaded.training
    assert loaded.hparams == model.hparams
    assert loaded.tokenizer.fingerprint == model.tokenizer.fingerprint
    assert torch.equal(outputs(loaded), outputs(model))
    shared = [[id(p) for _, p in m.named_parameters(remove_duplicate=False)] for m in (model, loaded)]
    assert [shared[0].index(x) for x in shared[0]] == [shared[1].index(x) for x in shared[1]]
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    file = load_file(tmp_path / "model" / "model.safetensors")
    assert sum(tensor.numel() for tensor in file.values()) == sum(p.numel() for p in model.parameters())
    outputs(loaded).square().sum().backward()  # it can be trained on
    loaded.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "SHA256SUMS").read_bytes() == (tmp_path / "model" / "SHA256SUMS").read_bytes()


def test_its_files_may_be_read_by_whom_the_user_lets_read(tmp_path):
    build(tokenizer=subwords()).save_pretrained(tmp_path / "model")
    (tmp_path / "other").write_text("")
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert modes == {(tmp_path / "other").stat().st_mode & 0o777}


def test_a_subword_tokenizer_travels_with_its_model(tmp_path):
    tokenizer = subwords()
    build(tokenizer=tokenizer).save_pretrained(tmp_path / "model")
    loaded = from_pretrained(str(tmp_path / "model")).tokenizer
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.end_id == tokenizer.end_id
    from lin_attn.data.tokenizer_spec import TokenizerSpec

    assert TokenizerSpec(str(tmp_path / "model")).open().fingerprint == tokenizer.fingerprint
    build().save_pretrained(tmp_path / "without")
    assert from_pretrained(tmp_path / "without").tokenizer is None


@pytest.mark.parametrize("kind", ["bytes", "bytes special", "subwords", "subwords special", "jieba"])
def test_a_folder_as_data_tokenizer_is_the_tokenizer_of_its_model(kind, tmp_path, monkeypatch):
    if kind == "jieba":
        pytest.importorskip("jieba")
        below = train_words([Document("a", ["我们学习分词 ".encode() * 20])], 280, segmenter="jieba")
    else:
        below = subwords() if kind.startswith("subwords") else ByteTokenizer()
    tokenizer = SpecialTokens(below, ["pad", "mask"]) if kind.endswith("special") else below
    commit = "0" * 40
    place = tmp_path / "models--Some--model" / "snapshots" / commit
    build(tokenizer=tokenizer).save_pretrained(place)
    (tmp_path / "models--Some--model" / "refs").mkdir()
    (tmp_path / "models--Some--model" / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in (str(place), "hub:Some/model"):
        found = TokenizerSpec(name).open()
        assert (type(found), found.fingerprint) == (type(tokenizer), tokenizer.fingerprint)
        with pytest.raises(ValueError, match="end_token"):
            TokenizerSpec(name, end_token="<end>").open()


def test_the_folder_of_a_model_without_tokenizer_is_none_for_data(tmp_path):
    build().save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="no tokenizer"):
        TokenizerSpec(str(tmp_path / "model")).open()


@pytest.mark.parametrize("below", [ByteTokenizer(), subwords()], ids=["bytes", "subwords"])
def test_special_tokens_travel_with_their_model(below, tmp_path):
    tokenizer = SpecialTokens(below, ["class", "separator", "mask"])
    build(tokenizer=tokenizer).save_pretrained(tmp_path / "model")
    loaded = from_pretrained(tmp_path / "model").tokenizer
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.ids == tokenizer.ids


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_weights_stored_in_another_dtype_are_those_rounded_to_it_once(stored, tmp_path):
    model = build()
    model.save_pretrained(tmp_path / "model", dtype=stored)
    loaded, as_stored = from_pretrained(tmp_path / "model"), from_pretrained(tmp_path / "model", dtype=stored)
    assert read_config(tmp_path / "model")["dtype"] == str(stored).removeprefix("torch.")
    for name, weight in model.named_parameters():
        assert weight.dtype == torch.float32  # the model itself is left as it is
        assert torch.equal(as_stored.get_parameter(name), weight.to(stored))
        assert loaded.get_parameter(name).dtype == torch.promote_types(stored, torch.float32)
        assert torch.equal(loaded.get_parameter(name), weight.to(stored).to(loaded.get_parameter(name).dtype))


def test_what_is_loaded_no_longer_depends_on_the_file(saved):
    model = from_pretrained(saved)
    before = outputs(model)
    with (saved / "model.safetensors").open("r+b") as file:
        file.truncate(0)
    assert torch.equal(outputs(model), before)


def test_a_run_s_checkpoint_loads_as_well(tmp_path):
    model = build(tokenizer=ByteTokenizer())
    trainer = Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path)
    trainer.strategy.connect(model)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = from_pretrained(tmp_path / "last.ckpt")
    assert torch.equal(outputs(loaded), outputs(model))
    assert from_pretrained(str(tmp_path / "last.ckpt"), dtype=torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"wanted one of a MaskedLM"):
        from_pretrained(tmp_path / "last.ckpt", kind=MaskedLM)
    assert main(["convert", str(tmp_path / "last.ckpt"), str(tmp_path / "model")]) == 0
    assert torch.equal(outputs(from_pretrained(tmp_path / "model")), outputs(model))


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


# Names


@pytest.fixture
def zoo(tmp_path, monkeypatch):
    """A zoo of one small model, and an empty working directory."""
    monkeypatch.setattr(loading, "ZOO", tmp_path / "zoo")
    build(tokenizer=ByteTokenizer()).save_pretrained(tmp_path / "zoo" / "little")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "zoo"


def test_a_shipped_name_is_that_whatever_lies_here_and_says_so(zoo, recwarn):
    assert models.available() == ["little"]
    from_pretrained("little")
    assert not recwarn
    build("masked").save_pretrained("little")
    with pytest.warns(UserWarning, match=r"for what lies here say \./little"):
        assert type(from_pretrained("little")) is CausalLM
    assert type(from_pretrained("./little")) is MaskedLM
    assert type(from_pretrained(Path("little"))) is MaskedLM


def test_a_name_that_is_none_is_told_with_those_there_are(zoo):
    for name in ("litle", "./little", "a/b/c", Path("little")):
        with pytest.raises(ValueError, match=r"there is no model .* come with lin-attn: little"):
            from_pretrained(name)
    with pytest.raises(ValueError, match=r"there is no checkpoint last\.ckpt"):
        from_pretrained("last.ckpt")
    for name in ("", None, 3):
        with pytest.raises(ValueError, match="name is"):
            from_pretrained(name)


def test_an_argument_that_does_not_apply_is_refused(zoo):
    with pytest.raises(ValueError, match=r"revision is 'main', and 'little' is not of the hub"):
        from_pretrained("little", revision="main")
    with pytest.raises(ValueError, match="wanted a MaskedLM"):
        from_pretrained("little", kind=MaskedLM)
    with pytest.raises(ValueError, match="kind is 'CausalLM'"):
        from_pretrained("little", kind="CausalLM")
    for device in ("tpu9", "cuda:99"):
        with pytest.raises(ValueError, match=f"device is '{device}'"):
            from_pretrained("little", device=device)
    with pytest.raises(ValueError, match="dtype is"):
        from_pretrained("little", dtype=torch.int64)
    assert isinstance(from_pretrained("little", kind=TrainedModel), CausalLM)


def test_the_command_line_takes_what_from_pretrained_takes(zoo, capsys):
    for option in ("--model", "--checkpoint"):
        assert main(["generate", option, "little", "--prompt", "All", "--max-new-tokens", "3", "--device", "cpu"]) == 0
        assert capsys.readouterr().out.startswith("All")
    assert main(["generate", "--model", "litle"]) == 2
    assert "come with lin-attn: little" in capsys.readouterr().err
    build().save_pretrained("mute")
    assert main(["generate", "--model", "mute", "--device", "cpu"]) == 2
    assert "has no tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["stdlib-linear-rope"])
def test_the_shipped_checkpoints_load(name):
    if name not in models.available():
        pytest.skip("no checkpoints in this tree")
    for shipped in models.available():
        assert from_pretrained(shipped).tokenizer is not None


# The hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache that looks like the hub's, with one model at two revisions, and no network."""
    root = tmp_path / "hub"
    place = root / "models--someone--small"
    for number, revision in enumerate(("main", "old")):
        commit = str(number) * 40
        model = build("causal" if revision == "main" else "masked")
        (place / "refs").mkdir(parents=True, exist_ok=True)
        (place / "refs" / revision).write_text(commit)
        model.save_pretrained(place / "snapshots" / commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return place


def test_a_model_of_the_hub_loads_from_its_cache_without_network(hub):
    assert torch.equal(outputs(from_pretrained("someone/small")), outputs(build()))
    assert type(from_pretrained("hub:someone/small", revision="old")) is MaskedLM


def test_a_folder_of_the_same_path_comes_before_the_hub_unless_it_is_named(hub):
    build("masked").save_pretrained("someone/small")
    assert type(from_pretrained("someone/small")) is MaskedLM
    assert type(from_pretrained("hub:someone/small")) is CausalLM


def test_a_hub_that_cannot_be_reached_is_told_in_one_sentence(hub, monkeypatch):
    with pytest.raises(ValueError, match=r"cannot load hub:someone/other, .*HF_HOME"):
        from_pretrained("someone/other")
    with pytest.raises(ValueError, match=r"cannot load hub:someone/small at revision v9"):
        from_pretrained("someone/small", revision="v9")
    with pytest.raises(ValueError, match="wanted hub:OWNER/NAME"):
        from_pretrained("hub:small")

    def unreachable(*_, **__):
        raise ConnectionError("no route to host\nand a page of details")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ValueError, match="no route to host") as error:
        from_pretrained("someone/small")
    assert "\n" not in str(error.value)


def test_only_the_files_of_a_model_are_downloaded(hub, monkeypatch):
    asked = {}

    def snapshot(repo_id, *, revision, allow_patterns):
        asked.update(repo_id=repo_id, revision=revision, patterns=allow_patterns)
        return str(hub / "snapshots" / ("0" * 40))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    from_pretrained("someone/small", revision="main")
    assert asked["repo_id"] == "someone/small"
    assert asked["revision"] == "main"
    assert set(folder.FILES) <= set(asked["patterns"])
    assert not any(pattern.endswith((".bin", ".pt", ".ckpt", ".py", "*")) for pattern in asked["patterns"])


def test_a_pickled_file_is_downloaded_only_where_there_is_no_other(tmp_path, monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 9,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "there")
    weights = tmp_path / "there" / "model.safetensors"
    torch.save(load_file(weights), tmp_path / "there" / "pytorch_model.bin")

    def snapshot(repo_id, *, revision, allow_patterns):
        (here := tmp_path / "here").mkdir(exist_ok=True)
        for path in (tmp_path / "there").iterdir():
            if any(path.match(pattern) for pattern in allow_patterns):
                shutil.copy(path, here)
        return str(here)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.warns(UserWarning, match="no tokenizer"):
        from_pretrained("someone/llama")
    assert not (tmp_path / "here" / "pytorch_model.bin").exists()
    weights.unlink()
    shutil.rmtree(tmp_path / "here")
    with pytest.warns(UserWarning, match="no tokenizer"):
        assert isinstance(from_pretrained("someone/llama"), CausalLM)


def test_what_is_pushed_is_the_folder_and_comes_back(tmp_path, monkeypatch):
    calls = []

    class Api:
        def create_repo(self, repo_id, *, private, exist_ok):
            calls.append(("create", repo_id, private, exist_ok))

        def upload_folder(self, *, repo_id, folder_path, revision, commit_message, delete_patterns):
            calls.append(("upload", repo_id, revision, commit_message, delete_patterns))
            shutil.copytree(folder_path, tmp_path / "remote")
            return type("Commit", (), {"commit_url": "the commit"})

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    model = build(tokenizer=ByteTokenizer())
    url = model.push_to_hub("someone/new", private=True, revision="main", message="first", summary={"steps": 5})
    assert url == "the commit"
    stale = ["tokenizer.json", "tokenizer_config.json"]
    assert calls == [("create", "someone/new", True, True), ("upload", "someone/new", "main", "first", stale)]
    assert torch.equal(outputs(from_pretrained(tmp_path / "remote")), outputs(model))
    assert 'from_pretrained("someone/new")' in (tmp_path / "remote" / "README.md").read_text()

    def refuse(*_, **__):
        raise ConnectionError("offline")

    monkeypatch.setattr(Api, "create_repo", refuse)
    with pytest.raises(
        ValueError, match=r"cannot put the model on the hub as 'someone/new' \(ConnectionError: offline"
    ):
        model.push_to_hub("someone/new")


# The card

SUMMARY = {
    "description": "Continues Python source.", "data": "the standard library", "steps": 500, "tokens": 4_096_000,
    "bits_per_byte": 2.34567, "metrics": {"validation perplexity": 5.08}, "decode_tokens_per_second": 1234.5,
    "hardware": "2 cores", "command": "lin-attn fit -c x.yaml", "license": "mit",
}  # fmt: skip


def test_the_card_tells_what_is_known_and_nothing_else(tmp_path):
    model = build(tokenizer=ByteTokenizer())
    model.save_pretrained(tmp_path / "full", summary=SUMMARY)
    card = (tmp_path / "full" / "README.md").read_text()
    assert read_config(tmp_path / "full")["summary"] == SUMMARY
    _, state = model(torch.zeros(1, 9, dtype=torch.int64), return_state=True)
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    for text in ("license: mit", "pipeline_tag: text-generation", SUMMARY["description"], "| steps | 500 |",
                 "| validation bits per byte | 2.34567 |", "| validation perplexity | 5.08 |", SUMMARY["command"],
                 f"| parameters | {n_parameters:,}, stored in float32 |", f"{state.nbytes:,} bytes at any length",
                 r"(R_m \varphi(q_m))^\top (R_n \varphi(k_n))"):  # fmt: skip
        assert text in card
    model.save_pretrained(tmp_path / "bare")
    bare = (tmp_path / "bare" / "README.md").read_text()
    assert not re.search(r"licen|steps|bits per byte|\btrained|measured|None|tokens a second", bare)


def test_the_equation_is_the_model_s(tmp_path):
    def equation(name, **network):
        kind, fields, options = MODELS[name]
        kind(network=fields | network, **options).save_pretrained(tmp_path / "m", overwrite=True)
        return (tmp_path / "m" / "README.md").read_text().split("$$")[1]

    assert r"\varphi(R_m q_m)^\top \varphi(R_n k_n)" in equation("causal", rope="before")
    assert "R_m" not in equation("causal", position="none")
    assert r"\frac" not in equation("causal", normalize=False)
    assert r"n \le m" not in equation("masked")
    assert "b_{mn}" in equation("causal t5")
    softmax = equation("causal", attention="softmax")
    assert r"\exp\left((R_m q_m)^\top (R_n k_n) / \sqrt{d}\right)" in softmax
    card = (tmp_path / "m" / "README.md").read_text()
    assert "| state of one sequence | 64 bytes a token |" in card  # one layer's keys and values, 2 · 8 numbers


@pytest.mark.parametrize(
    "summary", [{"bpb": 2.0}, {"steps": 1.5}, {"steps": True}, {"bits_per_byte": float("nan")}, {"license": ""},
                {"metrics": 3.0}, {"metrics": {"a": "b"}}, {"data": 3}], ids=str)  # fmt: skip
def test_a_figure_that_is_none_is_refused_before_anything_is_written(summary, tmp_path):
    with pytest.raises(ValueError, match=f"summary.*{next(iter(summary))}"):
        build().save_pretrained(tmp_path / "model", summary=summary)
    assert not list(tmp_path.iterdir())
