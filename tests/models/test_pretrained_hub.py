"""Models of the hub: loaded from its cache, told when it cannot be reached, and given to it."""

import shutil

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file

from lin_attn.data.tokenizer import ByteTokenizer
from models import CausalLM, MaskedLM, from_pretrained
from models.pretrained import folder
from tests.models.pretrained_models import build, outputs


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
