"""The checkpoints that come with the package: whole, small, equal but for the mechanism, as good as their cards say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lin_attn.data import TextCorpus
from models import CausalLM, MaskedLM, available, from_pretrained
from models.cli import main
from models.cli.configs import config_folder
from models.evaluation import Reading, evaluate
from models.pretrained import read_config
from models.pretrained.loading import ZOO

NAMES = ["stdlib-linear-none", "stdlib-linear-rope", "stdlib-masked-rope", "stdlib-softmax-rope"]
CAUSAL = [name for name in NAMES if "masked" not in name]

# What README shows, in a process that cannot reach a network, in an empty folder.
FIVE_LINES = """
import socket
def refuse(*_, **__):
    raise OSError("no network here")
socket.socket.connect = socket.getaddrinfo = refuse

from models import from_pretrained
for name in {names}:
    model = from_pretrained(name)
    print(repr(model.complete("def read(path):\\n", 40, temperature=0)))
"""


def test_what_is_shipped_is_what_was_promised_and_small():
    assert available() == NAMES
    sizes = [(ZOO / name / "model.safetensors").stat().st_size for name in NAMES]
    assert max(sizes) <= 8e6
    assert sum(sizes) <= 32e6


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_is_of_the_configuration_that_its_card_names(name):
    saved, path = read_config(ZOO / name), config_folder() / "zoo" / f"{name.removeprefix('stdlib-')}.yaml"
    config = yaml.safe_load(path.read_text())
    assert saved["summary"]["command"] == f"lin-attn fit -c configs/zoo/{path.name}"
    assert saved["class"] == config["model"]["class_path"].rpartition(".")[2]
    for part in ("network", "optimizer"):
        given = config["model"]["init_args"][part]
        assert {key: saved[part][key] for key in given} == given
    assert saved["summary"]["steps"] == config["trainer"]["max_steps"]


def test_the_language_models_differ_in_their_mechanism_alone():
    configs = [
        yaml.safe_load((config_folder() / "zoo" / f"{name.removeprefix('stdlib-')}.yaml").read_text())
        for name in CAUSAL
    ]
    for config in configs:
        for key in ("attention", "feature_map", "position", "rope"):
            config["model"]["init_args"]["network"].pop(key, None)
        config["trainer"].pop("default_root_dir")
    assert all(config == configs[0] for config in configs)


def test_they_continue_a_prompt_without_a_network_in_an_empty_folder(tmp_path):
    code = FIVE_LINES.format(names=CAUSAL)
    said = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = said.stdout.splitlines()
    assert len(lines) == len(CAUSAL)
    assert all(len(eval(line)) > 10 for line in lines)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", CAUSAL)
def test_they_foretell_held_out_files(name):
    """The beginning of them, of whatever Python runs the test, so not to the digit what the card says of them all."""
    corpus = TextCorpus("stdlib")
    corpus.prepare_data()
    model = from_pretrained(name, kind=CausalLM)
    found = evaluate(model, corpus.stores["validation"], Reading(512), max_tokens=32768, precision="32-true")
    said = read_config(ZOO / name)["summary"]["bits_per_byte"]
    assert found.bits_per_byte == pytest.approx(said, rel=0.25)
    assert found.bits_per_byte <= {"stdlib-linear-none": 3.0}.get(name, 2.4)


def test_the_masked_one_guesses_what_is_hidden():
    """Single bytes of a text that it has not seen: this file's own beginning, in pieces of 120 bytes."""
    model = from_pretrained("stdlib-masked-rope", kind=MaskedLM)
    text = Path(__file__).read_text()[500:2900]
    pieces = [text[i : i + 120] for i in range(0, len(text), 120)]
    found = [model.fill_mask(piece[:60] + "[MASK]" + piece[61:], top_k=1)[0][0].text == piece[60] for piece in pieces]
    assert sum(found) >= len(found) / 2


def test_the_list_has_every_figure(capsys):
    assert main(["zoo", "--json"]) == 0
    entries = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert sorted(entries) == NAMES
    for name in CAUSAL:
        found = entries[name]
        assert {f"bits_per_byte_at_{n}" for n in (512, 2048, 8192)} <= set(found)
        assert found["context"] == 512
        assert found["decode_tokens_per_second"] > 0
        assert (found["state_bytes_per_token"] > 0) == (found["attention"] == "softmax")
        assert (found["state_bytes"] > 0) == (found["attention"] == "linear")
    assert main(["zoo"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + len(NAMES)
    assert main(["zoo", "stdlib-linear-rope"]) == 0
    assert "varphi" in capsys.readouterr().out
    assert main(["zoo", "stdlib"]) == 2
    assert "wanted one of stdlib-linear-none" in capsys.readouterr().err
