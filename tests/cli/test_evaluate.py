"""lin-attn evaluate gives the figures of validate at the same length, and says what each way of reading measures."""

import json
import re

import datasets
import pytest
import torch

from lin_attn.data import TextCorpus
from models.checkpoint import load_checkpoint
from models.evaluation import Reading, evaluate, windows
from models.state_size import state_size
from tests.data.look_alikes import story, wikitext
from tests.models.test_generation import NETWORKS, build

QUIET = ["--trainer.enable_progress_bar", "false"]


@pytest.fixture
def checkpoint(trained):
    return trained / "checkpoints" / "last.ckpt"


@pytest.fixture(scope="module")
def store(books, tmp_path_factory):
    data = TextCorpus(str(books), validation_fraction=0.2, cache_dir=str(tmp_path_factory.mktemp("cache")))
    return data.stores["validation"]


def test_the_figures_are_those_of_validate_at_the_same_length(run, trained, checkpoint, books, tmp_path, capsys):
    data = ["--data", books, "--split", "validation", "--device", "cpu", "--json", tmp_path / "figures.json"]
    for precision in ("32-true", "bf16-mixed"):
        assert run("evaluate", "--model", checkpoint, *data, "--lengths", 64, 200, "--precision", precision) == 0
        out = capsys.readouterr().out
        told = json.loads((tmp_path / "figures.json").read_text())
        options = ["-c", trained / "fit.yaml", "--ckpt_path", checkpoint, *QUIET, "--data.eval_batch_size", 5]
        options += [
            "--trainer.limit_val_batches",
            1.0,
            "--trainer.accelerator",
            "cpu",
            "--trainer.precision",
            precision,
        ]
        for result, length in zip(told["results"], (64, 200), strict=True):
            assert run("validate", *options, "--data.block_length", length) == 0
            printed = capsys.readouterr().out
            for name in ("loss", "perplexity", "bits_per_byte"):
                [wanted] = re.findall(rf"val/{name}\W+([0-9.]+)", printed)
                # validate prints float32; in bfloat16, batches of other sizes round otherwise.
                close = 1e-6 if precision == "32-true" else 1e-4
                assert result[name] == pytest.approx(float(wanted), rel=close)
            assert f"{result['bits_per_byte']:.4f}" in out
            assert result["length"] == length
    assert told["precision"] == "bf16-mixed"
    assert told["data"] == [str(books)]


def test_each_target_counts_once_with_the_context_that_the_stride_leaves_it():
    for n, length, stride in (
        (1, 4, None),
        (8, 4, None),
        (11, 4, None),
        (11, 4, 1),
        (11, 4, 3),
        (3, 8, 5),
        (100, 8, 8),
    ):
        counted = []
        for one in windows(n, length, stride):
            assert one.stop - one.start <= length
            counted += range(one.first, one.stop + 1)
            least = 0 if one.first == 1 or stride is None else min(length - stride, one.first - 1)
            assert one.first - 1 - one.start >= least
        assert counted == list(range(1, n + 1))


def by_hand(model, store, reading, n):
    """Nats of each target from whole windows of context, read one by one."""
    stream = torch.from_numpy(store.tokens(0, n + 1).astype("int64"))
    nats, counted = [], 0
    step = reading.stride or reading.length
    for start in range(0, n, step):
        stop = min(start + reading.length, n)
        logprobs = model(stream[None, start:stop])[0].double().log_softmax(-1)
        own = -logprobs.gather(1, stream[start + 1 : stop + 1, None])[:, 0]
        nats += own[counted - start :].tolist()
        counted = stop
        if stop == n:
            break
    return sum(nats) / len(nats)


@pytest.mark.parametrize("name", ["linear", "softmax"])
@pytest.mark.parametrize(("length", "stride"), [(16, None), (16, 5), (7, 1), (500, None)])
def test_blocks_and_windows_are_what_they_say(store, name, length, stride):
    model, n = build(NETWORKS[name]), 150
    for batch_tokens in (1, 64):
        figures = evaluate(model, store, Reading(length, stride), max_tokens=n, batch_tokens=batch_tokens)
        assert figures.loss == pytest.approx(by_hand(model, store, Reading(length, stride), n), rel=1e-5)
        assert (figures.n_tokens, figures.state_bytes) == (n, None)
        assert figures.n_bytes == int((store.tokens(1, n + 1) != 256).sum())


def test_a_carried_state_sees_all_before_it_and_a_context_ends_it(store):
    linear, n = build(NETWORKS["linear"]), 150
    whole = evaluate(linear, store, Reading(n), max_tokens=n)
    carried = [evaluate(linear, store, Reading(k, carry_state=True), max_tokens=n) for k in (16, 50)]
    for one in carried:
        assert one.loss == pytest.approx(whole.loss, rel=1e-5)
    assert carried[0].state_bytes == carried[1].state_bytes > 0
    for name in ("linear", "softmax", "linear learned"):
        model = build(NETWORKS[name])
        short = evaluate(model, store, Reading(60), max_tokens=n)
        again = evaluate(model, store, Reading(20, carry_state=True, context=60), max_tokens=n)
        assert again.loss == pytest.approx(short.loss, rel=1e-5)
        assert again.loss != pytest.approx(evaluate(model, store, Reading(20), max_tokens=n).loss, rel=1e-4)
    assert again.state_bytes > 0


def test_a_state_that_grows_wants_a_context_and_is_told_by_what_it_does():
    grows = {name: state_size(build(fields)).per_token > 0 for name, fields in NETWORKS.items()}
    assert grows == {name: name in ("softmax", "softmax t5") for name in NETWORKS}


def test_a_limit_of_tokens_and_a_configuration_reach_the_text(run, trained, checkpoint, books, tmp_path, capsys):
    json_file = tmp_path / "figures.json"
    options = ["--model", checkpoint, "--lengths", 50, "--json", json_file, "--max-tokens", 120]
    assert run("evaluate", *options, "-c", trained / "fit.yaml") == 0
    by_config = json.loads(json_file.read_text())
    assert run("evaluate", *options, "--data", books) == 0
    assert json.loads(json_file.read_text())["results"][0]["loss"] == by_config["results"][0]["loss"]
    assert by_config["results"][0]["n_tokens"] == 120
    assert run("evaluate", *options, "--data", books, "--data.split", "tail", "--carry-state") == 0
    told = json.loads(json_file.read_text())
    assert told["rule"].startswith("tail")
    assert told["results"][0]["state_bytes"] > 0
    assert told["results"][0]["loss"] != by_config["results"][0]["loss"]
    out = capsys.readouterr().out
    assert "state carried" in out
    assert "state bytes" in out


def test_a_folder_gives_the_figures_of_its_checkpoint(run, checkpoint, books, tmp_path):
    load_checkpoint(checkpoint).save_pretrained(tmp_path / "model")
    found = []
    for name in (checkpoint, tmp_path / "model"):
        options = ["--data", books, "--lengths", 100, "--json", tmp_path / "figures.json"]
        assert run("evaluate", "--model", name, *options) == 0
        found.append(json.loads((tmp_path / "figures.json").read_text())["results"][0]["loss"])
    assert found[0] == found[1]


def test_a_set_of_the_hub_is_read_by_its_own_options_and_split(run, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    root = wikitext(tmp_path / "wikitext")
    options = ["--data", f"hub:{root}", "--data.config_name", "wikitext-2-raw-v1", "--data.row_separator", ""]
    options += ["--model", checkpoint, "--lengths", 128, "--split", "test", "--json", tmp_path / "figures.json"]
    assert run("evaluate", *options) == 0
    told = json.loads((tmp_path / "figures.json").read_text())
    rows = ["", " = wikitext-2-raw-v1 test = \n", "", *(f" {story(i + 2)} \n" for i in range(20))]
    assert told["documents"] == 1
    assert told["results"][0]["n_bytes"] == len("".join(rows).encode())


def test_weights_in_bfloat16_are_near_those_in_float32(store, checkpoint):
    model = load_checkpoint(checkpoint)
    wanted = evaluate(model, store, Reading(64)).loss
    assert evaluate(model.bfloat16(), store, Reading(64), precision="bf16-true").loss == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--lengths", "0"], "length is 0"),
        (["--lengths", "8", "8"], "each once"),
        (["--lengths", "8", "--stride", "9"], "stride"),
        (["--lengths", "8", "--stride", "4", "--carry-state"], "stride"),
        (["--lengths", "8", "--context", "16"], "carry_state"),
        (["--lengths", "8", "--carry-state", "--context", "12"], "multiple"),
        (["--lengths", "8", "--carry-state", "--batch-tokens", "12"], "--batch-tokens"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--data", "no/such/place"], "no/such/place"),
        (["--data", "stdlib", "-c", "lm/debug"], "--config"),
        (["--data.tokenizer", "bpe"], "tokenizer"),
        (["--data.splitt", "tail"], "splitt"),
        (["--json", "no/such/folder/figures.json"], "--json"),
        (["--json", "."], "--json"),
        (["--batch-tokens", "0"], "batch_tokens"),
        (["--model", "no.ckpt"], "no.ckpt"),
        (["--device", "abacus"], "--device"),
    ],
)
def test_what_cannot_be_meant_is_told_in_one_line(run, checkpoint, books, capsys, options, named):
    data = [] if {"--data", "-c"} & set(options) else ["--data", books]
    try:
        status = run("evaluate", "--model", checkpoint, *data, *options)
    except SystemExit as stop:  # a parser's
        status = stop.code
    assert status == 2
    error = capsys.readouterr().err
    assert named in error
    assert "Traceback" not in error


def test_softmax_with_a_carried_state_says_what_it_needs(store):
    for reading, model, named in (
        (Reading(8, carry_state=True), build(NETWORKS["softmax"]), "grows by .* wanted a context"),
        (Reading(128), build(NETWORKS["linear learned"]), "64 learned positions"),
        (Reading(8, carry_state=True), build(NETWORKS["linear learned"]), "64 learned positions"),
    ):
        with pytest.raises(ValueError, match=named):
            evaluate(model, store, reading)
