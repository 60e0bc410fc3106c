"""A run begins with the weights of another, all of them, or says which do not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lin_attn.data import MaskedCorpus
from lin_attn.data.special_tokens import SpecialTokens, agree
from lin_attn.data.tokenizer import ByteTokenizer
from models import CausalLM, MaskedLM, PairRanker, SequenceClassifier
from models.checkpoint import load_checkpoint, read_checkpoint
from models.cli import main
from models.initial_weights import InitialWeights, read_weights, take_weights
from tests.models.runs import write_corpus

NETWORK = {"vocab_size": 261, "d_model": 16, "n_layers": 2, "n_heads": 2, "attention": "softmax"}


def trainer(folder: Path, *callbacks: InitialWeights, steps: int = 1) -> Trainer:
    return Trainer(
        max_steps=steps, callbacks=list(callbacks), accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, limit_val_batches=0,
    )  # fmt: skip


def corpus(folder: Path, **options: object) -> MaskedCorpus:
    if not (folder / "text").exists():
        write_corpus(folder / "text")
    return MaskedCorpus(source=str(folder / "text"), block_length=16, batch_size=2, cache_dir=str(folder), **options)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of a MaskedLM after three steps."""
    run = trainer(tmp_path, steps=3)
    run.fit(MaskedLM(NETWORK), corpus(tmp_path))
    run.save_checkpoint(tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


def test_a_model_of_the_same_class_takes_every_weight(saved: Path) -> None:
    model = MaskedLM(NETWORK)
    assert take_weights(model, read_weights(saved)) == []
    wanted = load_checkpoint(saved, kind=MaskedLM).state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    assert model.head.output.weight is model.network.embedding.weight


def test_they_may_come_from_a_folder_of_save_pretrained(saved: Path, tmp_path: Path) -> None:
    load_checkpoint(saved, kind=MaskedLM).save_pretrained(tmp_path / "folder")
    ours, theirs = read_weights(tmp_path / "folder"), read_weights(saved)
    assert (ours.kind, ours.network) == (theirs.kind, theirs.network)
    assert ours.tokenizer is not None
    assert theirs.tokenizer is not None
    assert ours.tokenizer.fingerprint == theirs.tokenizer.fingerprint
    assert ours.state.keys() == theirs.state.keys()
    assert all(torch.equal(value, theirs.state[name]) for name, value in ours.state.items())


@pytest.mark.parametrize("kind", [SequenceClassifier, PairRanker])
def test_a_model_with_the_same_body_takes_that_and_begins_its_head_anew(kind: type, saved: Path) -> None:
    model = kind(NETWORK, pooler="gelu")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    new = take_weights(model, read_weights(saved))
    body = load_checkpoint(saved, kind=MaskedLM).network.state_dict()
    assert all(torch.equal(value, body[name]) for name, value in model.network.encoder.state_dict().items())
    assert sorted(new) == ["network.dense.bias", "network.dense.weight", "network.output.bias", "network.output.weight"]
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in new)


def test_a_head_that_is_named_is_replaced(tmp_path: Path) -> None:
    three, two = SequenceClassifier(NETWORK, n_classes=3), SequenceClassifier(NETWORK, n_classes=2)
    trainer(tmp_path).strategy.connect(three)
    run = trainer(tmp_path)
    run.strategy.connect(three)
    run.save_checkpoint(tmp_path / "three.ckpt")
    weights = read_weights(tmp_path / "three.ckpt")
    with pytest.raises(ValueError, match=r"another shape network.output.weight \(3, 16\) for \(2, 16\)"):
        take_weights(two, weights)
    assert take_weights(two, weights, ["network.output"]) == ["network.output.weight", "network.output.bias"]
    with pytest.raises(ValueError, match=r"replaced_weights has 'network.out'; wanted a part of the model"):
        take_weights(two, weights, ["network.out"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_layers": 3}, r"MaskedLM that does not have network.blocks.2.* and \d+ more"),
        ({"n_layers": 1}, r"MaskedLM that has besides network.blocks.1"),
        ({"d_ff": 20}, "another shape network.blocks.0"),
        ({"position": "learned", "max_length": 64}, "does not have network.learned_positions"),
    ],
)
def test_weights_of_another_network_are_refused_by_name(fields: dict, message: str, saved: Path) -> None:
    model = MaskedLM(NETWORK | fields)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        take_weights(model, read_weights(saved))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match=r"does not have|has besides"):
        take_weights(CausalLM(NETWORK), read_weights(saved))


def test_a_part_that_is_replaced_may_be_missing_or_left_over(saved: Path) -> None:
    learned = MaskedLM(NETWORK | {"position": "learned", "max_length": 64})
    new = take_weights(learned, read_weights(saved), ["network.learned_positions"])
    assert [name for name in new if "learned_positions" in name] == new != []


def test_the_optimizer_and_the_steps_begin_anew(saved: Path, tmp_path: Path) -> None:
    begun, model = trainer(tmp_path, InitialWeights(saved), steps=2), MaskedLM(NETWORK, {"lr": 1e-9, "warmup_steps": 0})
    begun.fit(model, corpus(tmp_path))
    assert begun.global_step == 2
    assert {state["step"].item() for state in begun.optimizers[0].state.values()} == {2.0}
    old = read_checkpoint(saved)["state_dict"]
    assert all(torch.allclose(value, old[name], atol=1e-6) for name, value in model.state_dict().items())


def test_a_resumed_run_goes_on_with_its_own_weights(saved: Path, tmp_path: Path) -> None:
    stopped = trainer(tmp_path, steps=2)
    stopped.fit(MaskedLM(NETWORK), corpus(tmp_path))
    stopped.save_checkpoint(tmp_path / "b.ckpt")
    states = []
    for callbacks in ([], [InitialWeights(saved)]):
        model = MaskedLM(NETWORK)
        trainer(tmp_path, *callbacks, steps=3).fit(model, corpus(tmp_path), ckpt_path=tmp_path / "b.ckpt")
        states.append(model.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_another_tokenizer_is_refused(saved: Path, tmp_path: Path) -> None:
    other = corpus(tmp_path, tokenizer="words", vocab_size=261)
    with pytest.raises(ValueError, match=r"initial_weights are of bytes-1 .* data.tokenizer=.*a\.ckpt"):
        trainer(tmp_path, InitialWeights(saved)).fit(MaskedLM(NETWORK | {"vocab_size": 265}), other)
    plain = ByteTokenizer()
    assert agree(plain, SpecialTokens(plain, ["pad"]))
    assert agree(SpecialTokens(plain, ["pad"]), SpecialTokens(plain, ["pad", "mask"]))
    assert not agree(SpecialTokens(plain, ["pad", "mask"]), SpecialTokens(plain, ["mask", "pad"]))


def test_fit_takes_them_by_name_and_says_so(saved: Path, tmp_path: Path, capfd: Any, caplog: Any) -> None:
    command = ["fit", "--model", "models.MaskedLM", "--model.network.attention", "softmax", "--data",
               "lin_attn.data.MaskedCorpus", "--data.source", tmp_path / "text", "--data.block_length", "16",
               "--data.batch_size", "2", "--data.cache_dir", tmp_path, "--trainer.max_steps", "1",
               "--trainer.val_check_interval", "1", "--trainer.default_root_dir", tmp_path / "runs",
               "--trainer.enable_progress_bar", "false"]  # fmt: skip
    for name in ("d_model", "vocab_size", "n_layers", "n_heads"):
        command += [f"--model.network.{name}", NETWORK[name]]
    arguments = [str(argument) for argument in command]
    assert main([*arguments, "--initial_weights", str(saved)]) == 0, capfd.readouterr().err
    assert f"begins with the weights of {saved}" in caplog.messages
    assert main([*arguments, "--initial_weights", str(saved), "--replaced_weights", "[head]"]) == 0
    assert any("; new: head.transform.weight" in message for message in caplog.messages)
    nowhere = ["--initial_weights", str(tmp_path / "no.ckpt")]
    assert main([*arguments, *nowhere]) == 2
    assert "there is no checkpoint" in capfd.readouterr().err
    assert main([*arguments, *nowhere, "--ckpt_path", "last"]) == 0  # a run that is resumed does not need them
    assert main([*arguments, "--replaced_weights", "[head]"]) == 2
    assert "without initial_weights" in capfd.readouterr().err
