"""`lin-attn data info` counts what is there, and a checkpoint carries the tokenizer of its run."""

import re

import torch

from models.checkpoint import load_checkpoint

BPE = ["--data.tokenizer", "bpe", "--data.vocab_size", "300"]


def counts(printed):
    """Documents, bytes, tokens and blocks of each split."""
    rows = re.findall(
        r"^ *(train|validation|test) +([\d,]+) +([\d,]+) +([\d,]+) +[\d.]+ +([\d,]+)$", printed, flags=re.M
    )
    return {split: [int(number.replace(",", "")) for number in numbers] for split, *numbers in rows}


def test_info_counts_documents_bytes_tokens_and_blocks_and_shows_a_sample(run, books, capsys):
    assert run("data", "info", "--data.source", books, "--data.block_length", "100") == 0
    printed = capsys.readouterr().out
    found = counts(printed)
    sizes = [path.stat().st_size for path in books.iterdir()]
    assert sum(row[0] for row in found.values()) == 40
    assert sum(row[1] for row in found.values()) == sum(sizes)
    assert all(n_tokens == n_bytes + n_documents + 1 for n_documents, n_bytes, n_tokens, _ in found.values())
    assert all(n_blocks == -(-(n_tokens - 1) // 100) for _, _, n_tokens, n_blocks in found.values())
    assert "Chapter" in printed
    assert run("data", "info", "-c", "configs/lm/debug.yaml", "--data.source", books, *BPE) == 0
    by_bpe = counts(capsys.readouterr().out)
    assert {split: row[:2] for split, row in by_bpe.items()} == {split: row[:2] for split, row in found.items()}
    assert by_bpe["train"][2] < found["train"][2] / 1.5


def test_info_tells_the_blocks_of_each_source_of_a_mixture(run, books, capsys):
    source = f'[{{"path": "{books}", "weight": 2}}, "{books.parent}/no*such"]'
    assert run("data", "info", "--data.source", source) == 2
    assert "no*such" in capsys.readouterr().err
    source = f'[{{"path": "{books}/book0*", "weight": 2}}, "{books}/book1*"]'
    assert run("data", "info", "--data.source", source) == 0
    assert re.search(r"training blocks of each source: \d+, \d+", capsys.readouterr().out)


def test_options_are_those_of_the_class_that_the_configuration_names(run, capsys):
    config = "configs/roformer/small-translation-linear-rope.yaml"
    sizes = ["--data.n_examples", "200", "--data.tokenizer", "bytes", "--data.vocab_size", "null"]
    sizes += ["--data.max_length", "1000"]
    assert run("data", "info", "-c", config, *sizes) == 0
    counts = re.findall(r"^ *(?:train|validation|test) +(\d+) ", capsys.readouterr().out, flags=re.M)
    assert sum(map(int, counts)) == 200


def test_a_mistake_is_told_in_a_line(run, capsys):
    for arguments, named in (
        (["data", "infoo"], "infoo"),
        (["data", "info", "-c", "no.yaml"], "no.yaml"),
        (["data", "info", "--data.source", "no/such"], "no/such"),
        (["data", "info", "--data.tokenizer", "no.json"], "no.json"),
    ):
        try:
            status = run(*arguments)
        except SystemExit as end:
            status = end.code
        assert status == 2
        [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lin-attn")]
        assert named in line


def test_a_checkpoint_carries_its_bpe_and_reads_other_text_with_it(run, books, tmp_path, capsys):
    arguments = ["-c", "configs/lm/debug.yaml", "--trainer.enable_progress_bar", "false", "--data.source", books]
    assert run("fit", *arguments, *BPE, "--model.network.vocab_size", "300", "--trainer.max_steps", "4") == 0
    checkpoint = tmp_path / "runs" / "debug" / "version_0" / "checkpoints" / "last.ckpt"
    model = load_checkpoint(checkpoint)
    assert model.tokenizer.vocab_size <= 300
    text = "Chapter 3.\nThe fox é".encode()
    assert model.tokenizer.decode(model.tokenizer.encode(text)) == text
    assert torch.load(checkpoint, weights_only=True)["tokenizer"] == model.tokenizer.to_dict()

    other = tmp_path / "other.txt"
    other.write_text("Quite another text, of which no vocabulary was learned. " * 99)
    saved = ["--ckpt_path", checkpoint, "--data.tokenizer", checkpoint, "--trainer.default_root_dir", tmp_path]
    assert run("test", *arguments[:-1], other, *saved[:2], *BPE) == 2
    assert "give the checkpoint as data.tokenizer" in capsys.readouterr().err
    assert run("test", *arguments[:-1], other, *saved) == 0
    assert run("predict", *arguments[:-1], other, *saved) == 0
    [table] = tmp_path.rglob("predictions.csv")
    assert int(table.read_text().splitlines()[1].split(",")[2]) == round(other.stat().st_size * 0.05)
    capsys.readouterr()
    assert run("generate", "--checkpoint", checkpoint, "--prompt", "The ", "--seed", "1", "--max-new-tokens", "9") == 0
    assert capsys.readouterr().out.startswith("The ")
