"""Masks hide what they should, are the same whenever they are drawn again, and lose no text."""

import random
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tokenizers import Tokenizer, models, pre_tokenizers

from lin_attn.data import MaskedCorpus, SpecialTokens, TextCorpus
from lin_attn.data.blocks import IGNORED
from lin_attn.data.bpe import train_bpe
from lin_attn.data.documents import Document
from lin_attn.data.masking import Masking, Words
from lin_attn.data.subword import SubwordTokenizer
from lin_attn.data.tokenizer import ByteTokenizer
from lin_attn.data.whole_words import words_of
from models import MaskedLM

PAD, CLASS, SEPARATOR, MASK, END = 257, 258, 259, 260, 256
ORDINARY = np.arange(1000) < 900


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIN_ATTN_CACHE", str(tmp_path / "cache"))
    letters = random.Random(0)
    for i in range(30):
        path = tmp_path / "text" / f"{i:02}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(letters.choice("abcdefgh \n") for _ in range(60 + 5 * i)))
    return tmp_path / "text"


def corpus(source: Any, **options: Any) -> MaskedCorpus:
    return MaskedCorpus(
        **{"source": str(source) if isinstance(source, Path) else source, "block_length": 32, "batch_size": 4} | options
    )


def batches(data: MaskedCorpus, epoch: int = 0) -> list[dict[str, torch.Tensor]]:
    loader = data.train_dataloader()
    loader.sampler.set_epoch(epoch)
    return list(loader)


def same(a: list[dict[str, torch.Tensor]], b: list[dict[str, torch.Tensor]]) -> bool:
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(map(torch.equal, x.values(), y.values())) for x, y in zip(a, b, strict=True)
    )


def restored(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.where(batch["targets"] == IGNORED, batch["tokens"], batch["targets"])


def test_of_the_chosen_places_eight_tenths_are_masked_one_is_random_one_stays() -> None:
    draw = np.random.default_rng(0)
    text = draw.integers(1000, size=200_000)
    tokens, targets = Masking(ORDINARY, 999)(text, draw)
    chosen = targets != IGNORED
    np.testing.assert_array_equal(targets[chosen], text[chosen])
    np.testing.assert_array_equal(tokens[~chosen], text[~chosen])
    assert ORDINARY[text[chosen]].all()
    assert chosen.sum() == round(0.15 * ORDINARY[text].sum())
    masked, kept = tokens[chosen] == 999, tokens[chosen] == targets[chosen]
    # 27,000 draws: four standard deviations are 0.01.
    assert masked.mean() == pytest.approx(0.8, abs=0.01)
    assert kept.mean() == pytest.approx(0.1 + 0.1 / 900, abs=0.01)
    others = tokens[chosen][~masked & ~kept]
    assert ORDINARY[others].all()
    assert len(np.unique(others)) > 800
    # Every place is chosen as often as any other: no part of the text is spared.
    assert np.histogram(np.flatnonzero(chosen), 10, (0, len(text)))[0] == pytest.approx(chosen.sum() / 10, rel=0.1)


def test_a_short_text_has_one_mask_and_a_text_of_special_tokens_none() -> None:
    draw = np.random.default_rng(0)
    assert (Masking(ORDINARY, 999)(np.array([950, 3, 951]), draw)[1] != IGNORED).tolist() == [False, True, False]
    assert (Masking(ORDINARY, 999)(np.array([950, 951]), draw)[1] == IGNORED).all()
    assert len(Masking(ORDINARY, 999)(np.array([], dtype=np.int64), draw)[0]) == 0


def test_whole_words_are_masked_whole() -> None:
    draw = np.random.default_rng(0)
    words = Words(np.arange(1000) % 4 != 0, np.ones(1000, dtype=bool))  # a word begins at each multiple of four
    text = draw.integers(900, size=60_000)
    _, targets = Masking(ORDINARY, 999, words=words)(text, draw)
    chosen = targets != IGNORED
    assert chosen.sum() == round(0.15 * len(text))
    word_of = words.of(text)
    share = np.bincount(word_of, chosen) / np.bincount(word_of)
    assert set(np.unique(share)) == {0.0, 1.0}
    sizes = np.bincount(word_of)
    assert np.corrcoef(sizes, share)[0, 1] == pytest.approx(0, abs=0.04)  # long and short words alike


def test_a_word_that_is_longer_than_all_masks_together_is_masked_in_part() -> None:
    words = Words(np.ones(1000, dtype=bool), np.ones(1000, dtype=bool))
    _, targets = Masking(ORDINARY, 999, words=words)(np.arange(100), np.random.default_rng(0))
    assert (targets != IGNORED).sum() == 15


def word_piece() -> SubwordTokenizer:
    vocabulary = {word: i for i, word in enumerate(["[UNK]", "[SEP]", "un", "##known", "word", "##s", "."])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return SubwordTokenizer(tokenizer.to_str(), "[SEP]")


def test_words_are_told_by_bytes_by_a_byte_level_bpe_and_by_word_piece() -> None:
    text = "unknown words. é_1 x"
    wanted = ["unknown", "words", "é_1", "x"]
    bpe = train_bpe([Document("text", [b"unknown words"])], 262)
    for plain in (ByteTokenizer(), bpe):
        tokenizer = SpecialTokens(plain, ["mask"])
        tokens = tokenizer.encode(text)
        words = words_of(tokenizer).of(tokens)
        pieces = [tokenizer.decode(tokens[words == word]).decode() for word in range(words.max() + 1)]
        assert [piece.strip() for piece in pieces if piece.strip(" .")] == wanted
        assert "".join(pieces) == text
        assert len(words_of(tokenizer).of(np.array([97, tokenizer.end_id, 98]))) == 3
    tokenizer = SpecialTokens(word_piece(), ["mask"])
    assert words_of(tokenizer).of(tokenizer.encode("unknown words.")).tolist() == [0, 0, 1, 1, 2]


def test_a_vocabulary_without_words_is_refused_for_whole_words() -> None:
    tokenizer = SubwordTokenizer(Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0)).to_str(), "<unk>")
    with pytest.raises(ValueError, match="whole_words is true, and the vocabulary of a Unigram"):
        words_of(SpecialTokens(tokenizer, ["mask"]))


@pytest.mark.parametrize("framed", [True, False])
def test_an_epoch_has_every_token_of_the_text_once(text: Path, framed: bool) -> None:
    data = corpus(text, framed=framed)
    data.setup("fit")
    stream = data.stores["train"].tokens(0, len(data.stores["train"]))[1:]
    found = []
    for batch in batches(data):
        whole = restored(batch)
        assert whole.shape[1] == 32
        for row, real in zip(whole, batch.get("key_mask", torch.ones(whole.shape, dtype=torch.bool)), strict=True):
            assert (row[~real] == PAD).all()
            row = row[real]
            if framed:
                assert (row[0], row[-1]) == (CLASS, SEPARATOR)
                row = row[1:-1]
            found.append(tuple(row.tolist()))
    size = 30 if framed else 32
    assert sorted(found) == sorted(tuple(stream[i : i + size].tolist()) for i in range(0, len(stream), size))


def test_special_tokens_are_never_masked_and_never_drawn(text: Path) -> None:
    data = corpus(text, mask_probability=1.0, random_share=0.2)
    data.setup("fit")
    for batch in batches(data):
        assert (batch["targets"] < END).all()
        kept = batch["tokens"][batch["targets"] == IGNORED]
        assert set(kept.tolist()) <= {END, PAD, CLASS, SEPARATOR}
        assert set(batch["tokens"][batch["targets"] != IGNORED].tolist()) <= {*range(256), MASK}


def test_masks_are_those_of_seed_and_epoch_and_other_ones_in_another(text: Path) -> None:
    data = corpus(text, seed=3)
    first, second = batches(data), batches(data, 1)
    assert same(first, batches(corpus(text, seed=3)))
    assert same(second, batches(corpus(text, seed=3, num_workers=2), 1))
    masked = [
        {
            tuple(row): tuple(targets)
            for b in epoch
            for row, targets in zip(restored(b).tolist(), b["targets"].tolist(), strict=True)
        }
        for epoch in (first, second)
    ]
    assert masked[0].keys() == masked[1].keys()
    # A short last block may get the same masks twice.
    assert sum(masked[0][row] == masked[1][row] for row in masked[0]) <= 1
    by_place = [torch.cat([batch["targets"] != IGNORED for batch in epoch]) for epoch in (first, second)]
    assert (by_place[0] == by_place[1]).all(1).sum() <= 1


def test_a_block_that_comes_twice_in_an_epoch_of_a_mixture_has_two_masks(text: Path) -> None:
    sources = [{"path": str(text / "2*.txt"), "weight": 2}, {"path": str(text / "0*.txt"), "weight": 8}]
    data = corpus(sources, validation_fraction=0.0, test_fraction=0.0)
    data.setup("fit")
    rows: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    n_rows = 0
    for batch in batches(data):
        for row, targets in zip(restored(batch).tolist(), batch["targets"].tolist(), strict=True):
            rows.setdefault(tuple(row), set()).add(tuple(targets))
            n_rows += 1
    bounds = data.source_blocks()
    assert n_rows == bounds[-1]
    small = bounds[2] - bounds[1]
    assert 0.8 * n_rows > 1.5 * small, "the second source has to be repeated for this test"
    assert sum(map(len, rows.values())) == n_rows


def test_a_mixture_of_eight_to_two_is_one_to_the_block(tmp_path: Path) -> None:
    for letter, size in (("a", 2999), ("b", 2000)):  # and an end: 100 whole blocks of a
        (tmp_path / f"{letter}.txt").write_text(letter * size)
    sources = [{"path": str(tmp_path / "a.txt"), "weight": 8}, {"path": str(tmp_path / "b.txt"), "weight": 2}]
    data = corpus(sources, validation_fraction=0.0, test_fraction=0.0, cache_dir=str(tmp_path / "cache"))
    data.setup("fit")
    rows = torch.cat([restored(batch) for batch in batches(data)])
    of_b = int(((rows == ord("b")).sum(1) > (rows == ord("a")).sum(1)).sum())
    assert (len(rows) - of_b, of_b) == (round(0.8 * len(rows)), round(0.2 * len(rows)))


def test_processes_together_see_what_one_sees(text: Path) -> None:
    one = corpus(text)
    ranks = []
    for rank in range(2):
        data = corpus(text, batch_size=2)
        data.setup("fit")
        sampler = type(one.train_dataloader().sampler)(data.train_dataloader().sampler.order, rank=rank, world_size=2)
        ranks.append([data.blocks("train")[draw] for draw in sampler])
    together = [row for pair in zip(*ranks, strict=True) for row in pair]
    alone = [{k: v[i] for k, v in b.items()} for b in batches(one) for i in range(len(b["tokens"]))]
    for a, b in zip(alone, together, strict=False):
        assert torch.equal(a["tokens"], b["tokens"])
        assert torch.equal(a["targets"], b["targets"])


def test_validation_masks_are_the_same_in_every_epoch_and_for_every_seed(text: Path) -> None:
    found = []
    for seed, epoch in ((0, 0), (1, 0), (1, 5)):
        data = corpus(text, seed=seed, validation_fraction=0.3)
        data.setup("validate")
        loader = data.val_dataloader()
        loader.sampler.set_epoch(epoch)
        found.append(list(loader))
    assert same(found[0], found[1])
    assert same(found[0], found[2])


def test_a_loader_that_is_resumed_goes_on_with_the_same_masks(text: Path) -> None:
    loader = corpus(text).train_dataloader()
    loader.sampler.set_epoch(2)
    whole = list(loader)
    loader.sampler.set_epoch(2)
    given = list(islice(iter(loader), 3))
    resumed = corpus(text, num_workers=1).train_dataloader()
    resumed.load_state_dict({**loader.state_dict(), "batches": 3})
    resumed.sampler.set_epoch(2)
    assert same([*given, *resumed], whole)


def test_a_run_that_is_resumed_ends_with_the_same_weights(text: Path, tmp_path: Path) -> None:
    network = {"vocab_size": 261, "d_model": 16, "n_layers": 1, "n_heads": 2, "dropout": 0.1, "attention": "softmax"}
    options: dict[str, Any] = {
        "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "default_root_dir": tmp_path, "limit_val_batches": 1, "max_epochs": -1, "max_steps": 40,
    }  # fmt: skip

    def fit(seed: int, path: Path | None = None) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        model = MaskedLM(network, {"max_steps": 60, "warmup_steps": 3})
        kept = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=25)
        Trainer(callbacks=kept, **options).fit(model, corpus(text, validation_fraction=0.3), ckpt_path=path)
        return model.state_dict()

    whole = fit(0)
    resumed = fit(1, tmp_path / "step=25.ckpt")  # in the middle of the second epoch, which has 18 batches
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


def test_the_text_is_cached_once_for_both_kinds_of_language_model(text: Path) -> None:
    causal = TextCorpus(str(text), 32, 4)
    causal.setup()
    masked = corpus(text)
    masked.setup()
    assert masked.stores["train"].folder == causal.stores["train"].folder


def test_a_checkpoint_carries_the_special_tokens_to_the_next_run(text: Path, tmp_path: Path) -> None:
    data = corpus(text)
    torch.save({"tokenizer": data.tokenizer.to_dict()}, tmp_path / "a.ckpt")
    again = corpus(text, tokenizer=str(tmp_path / "a.ckpt"))
    again.setup("fit")
    assert again.tokenizer.fingerprint == data.tokenizer.fingerprint
    assert again.vocab_size == 261
    assert same(batches(again), batches(data))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_probability": 0.0}, "mask_probability is 0.0; wanted a number above 0"),
        ({"mask_share": 0.8, "random_share": 0.3}, "sum of at most 1"),
        ({"block_length": 2}, "block_length is 2; wanted at least 3"),
        ({"batch_size": 0}, "batch_size must be"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(text: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        corpus(text, **options)
