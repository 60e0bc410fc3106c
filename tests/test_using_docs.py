"""The snippets of docs/using-models.md run, in their order, on models of the kinds they name."""

import re
import shlex
from pathlib import Path

import torch

import models
from lin_attn.data import ByteTokenizer
from lin_attn.data.special_tokens import SpecialTokens
from models.cli import COMMANDS, evaluate, harness

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "using-models.md").read_text()
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```", TEXT, flags=re.M | re.S)


def small(name, *, kind):
    """A model of that kind in place of the one that is named."""
    torch.manual_seed(0)
    made = kind(network={"vocab_size": 264, "d_model": 16, "n_layers": 1, "n_heads": 2})
    made.tokenizer = ByteTokenizer() if kind is models.CausalLM else SpecialTokens(ByteTokenizer())
    return made


def test_every_snippet_of_python_runs(monkeypatch, capsys):
    monkeypatch.setattr(models, "from_pretrained", small, raising=False)
    names = {}
    snippets = [text for language, text in BLOCKS if language == "python"]
    for snippet in snippets:
        exec(snippet, names)
    assert len(snippets) == 5
    assert capsys.readouterr().out


def test_every_command_has_arguments_that_it_takes():
    parsers = {"evaluate": evaluate.parser, "lm-eval": harness.parser}
    lines = [shlex.split(line) for language, text in BLOCKS if language == "sh" for line in text.splitlines()]
    commands = [line[1:] for line in lines if line[0] == "lin-attn"]
    for command, *arguments in commands:
        assert command in COMMANDS
        parsers[command]().parse_args(arguments)
    assert len(commands) == 3
