"""A pretrained model comes back as it was given, by its name or place, with a card that tells what is known."""

import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from lightning.pytorch import Trainer
from safetensors.torch import load_file

import models
from lin_attn.data.documents import Document
from lin_attn.data.special_tokens import SpecialTokens
from lin_attn.data.tokenizer import ByteTokenizer
from lin_attn.data.tokenizer_spec import TokenizerSpec
from lin_attn.data.words import train_words
from models import CausalLM, MaskedLM, from_pretrained
from models.cli import main
from models.pretrained import loading, read_config
from models.training import TrainedModel
from tests.models.pretrained_models import MODELS, build, outputs, subwords


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
