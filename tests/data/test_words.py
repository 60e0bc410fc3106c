"""A word is one token if it is known, and else its characters, and no byte is lost."""

import json
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lin_attn.data import MaskedCorpus, SpecialTokens, TextCorpus, words
from lin_attn.data.documents import Document
from lin_attn.data.subword import SubwordTokenizer
from lin_attn.data.tokenizer import tokenizer_from_dict
from lin_attn.data.tokenizer_spec import TokenizerSpec
from lin_attn.data.whole_words import words_of
from lin_attn.data.words import train_words

CUT = "今天 天气 非常 好 。 今天 好 hello World hello\n"
WHOLE = "今天天气非常好。今天好hello World hello\n"


@pytest.fixture
def jieba(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of jieba, what knows four words."""

    class Segmenter:
        def tokenize(self, text: str, HMM: bool) -> Any:  # noqa: N803
            assert not HMM
            start = 0
            while start < len(text):
                known = ("今天", "天气", "非常", "hello")
                word = next((word for word in known if text.startswith(word, start)), text[start])
                yield word, start, start + len(word)
                start += len(word)

    module = SimpleNamespace(Tokenizer=Segmenter, setLogLevel=lambda level: None)
    monkeypatch.setitem(sys.modules, "jieba", module)
    monkeypatch.setattr(words, "jieba_version", lambda: "0")


def spelt(tokenizer: SubwordTokenizer, text: str) -> list[str]:
    return [tokenizer.vocabulary[index] for index in tokenizer.encode(text)]


def test_a_known_word_is_a_token_another_its_characters_and_an_unknown_character_its_bytes() -> None:
    tokenizer = train_words([Document("text", [CUT.encode()])], 300)
    assert spelt(tokenizer, "今天 天气坏 hello heo") == [
        "今天", "天", "气", "<0xE5>", "<0x9D>", "<0x8F>", "hello", "h", "e", "o",
    ]  # fmt: skip
    assert tokenizer.decode(tokenizer.encode("今天 坏 hello 。")).decode() == "今天 坏 hello 。"
    assert tokenizer.end_id == 0
    assert 0 not in tokenizer.encode("<|endoftext|>")


def test_jieba_cuts_what_has_no_spaces(jieba: None) -> None:
    tokenizer = train_words([Document("text", [WHOLE.encode()])], 300, segmenter="jieba")
    assert spelt(tokenizer, "今天天气好hello坏") == ["今天", "天气", "好", "hello", "<0xE5>", "<0x9D>", "<0x8F>"]
    assert tokenizer.decode(tokenizer.encode("今天天气坏")).decode() == "今天天气坏"
    saved = json.loads(json.dumps(tokenizer.to_dict()))
    for back in (tokenizer_from_dict(saved), pickle.loads(pickle.dumps(tokenizer))):
        assert back.fingerprint == tokenizer.fingerprint
        np.testing.assert_array_equal(back.encode(WHOLE), tokenizer.encode(WHOLE))
    plain = SubwordTokenizer(tokenizer.to_dict()["json"], "<|endoftext|>")
    assert plain.fingerprint != tokenizer.fingerprint
    assert len(plain.encode(WHOLE)) != len(tokenizer.encode(WHOLE))


def test_the_real_jieba_finds_words() -> None:
    pytest.importorskip("jieba")
    tokenizer = train_words([Document("text", ["我来到北京清华大学。".encode()])], 300, segmenter="jieba")
    assert spelt(tokenizer, "来到北京清华大学") == ["来到", "北京", "清华大学"]


@pytest.mark.parametrize("segmenter", ["words", "jieba"])
def test_every_byte_is_counted_once(segmenter: str, jieba: None) -> None:
    tokenizer = train_words([Document("text", [CUT.encode()])], 280, segmenter=segmenter)
    for text in (CUT.encode() * 3, b"\xff\xfe \xe4\xb8", "  坏 é\n\n".encode(), b"x" * 70_000, WHOLE.encode() * 3000):
        counts = np.concatenate([piece.n_bytes for piece in tokenizer.encode_pieces([text])])
        assert counts.min() >= 0
        assert counts.sum() == len(text)


def test_the_commonest_words_and_characters_come_first_and_the_size_is_what_was_asked_for() -> None:
    text = "aa " * 9 + "bb " * 8 + "c " * 7 + "cc " * 3
    tokenizer = train_words([Document("text", [text.encode()])], 262, ["<|user|>"])
    assert tokenizer.vocab_size == 262
    # a: 18, b: 16, c: 13 in all words; then aa, of which there are 9.
    assert tokenizer.vocabulary[257:] == ["a", "b", "c", "aa", "<|user|>"]
    assert spelt(tokenizer, "aa <|user|> bb") == ["aa", "<|user|>", "b", "b"]


def vocabulary(folder: Path, *lines: str) -> str:
    path = folder / "vocab.txt"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_a_vocabulary_from_a_file_keeps_its_ids_and_its_special_tokens(tmp_path: Path) -> None:
    path = vocabulary(tmp_path, "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "今天", "好", "hello")
    tokenizer = TokenizerSpec(f"words:{path}").open()
    assert tokenizer.encode("今天 Hello 坏 [MASK]").tolist()[:3] == [5, 7, 1]
    assert tokenizer.end_id == 3
    assert {3, 4}.isdisjoint(tokenizer.encode("[MASK] [SEP]").tolist())
    special = SpecialTokens(tokenizer, ["pad", "class", "separator", "mask"])
    assert (special.ids, special.vocab_size) == ({"pad": 0, "class": 2, "separator": 3, "mask": 4}, 8)
    (tmp_path / "b").mkdir()
    cased = TokenizerSpec(f"words:{vocabulary(tmp_path / 'b', '[UNK]', 'Hello', 'hello')}").open()
    assert cased.encode("Hello hello").tolist() == [1, 2]
    assert cased.end_id == 3


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["a", "b"], r"has no token for what is not in it; wanted a line \[UNK\]"),
        (["[UNK]", "a", "a"], "has 'a' twice"),
        (["[UNK]", "", "a"], "has an empty line"),
    ],
)
def test_what_is_no_vocabulary_is_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenizerSpec(f"words:{vocabulary(tmp_path, *lines)}").open()
    with pytest.raises(ValueError, match="cannot read the vocabulary 'nowhere"):
        TokenizerSpec("words:nowhere.txt").open()


def test_without_jieba_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(words, "version", missing)
    with pytest.raises(ValueError, match=r"pip install lin-attn\[chinese\]"):
        TextCorpus(tokenizer="jieba").setup()


@pytest.mark.parametrize("name", ["words", "jieba"])
def test_a_corpus_is_read_with_them_and_opened_again(name: str, jieba: None, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text((CUT if name == "words" else WHOLE) * 40)

    def corpus() -> MaskedCorpus:
        data = MaskedCorpus(
            source=str(tmp_path / "a.txt"), tokenizer=name, vocab_size=290, block_length=16, batch_size=2,
            whole_words=True, cache_dir=str(tmp_path / "cache"),
        )  # fmt: skip
        data.setup("fit")
        return data

    first, again = corpus(), corpus()
    assert first.tokenizer.fingerprint == again.tokenizer.fingerprint
    stream = again.stores["train"]
    assert "天气" in [again.tokenizer.tokenizer.vocabulary[index] for index in stream.tokens(1, len(stream))]
    assert next(iter(again.train_dataloader()))["tokens"].max() < again.vocab_size


def test_each_word_is_a_word_of_its_own_for_whole_word_masking() -> None:
    tokenizer = SpecialTokens(train_words([Document("text", [CUT.encode()])], 300), ["mask"])
    assert words_of(tokenizer).of(tokenizer.encode("今天 好 hello")).tolist() == [0, 1, 2]


def test_other_options_without_effect_are_refused() -> None:
    with pytest.raises(ValueError, match="train one with tokenizer bpe, words, jieba"):
        TokenizerSpec("words:vocab.txt", vocab_size=300)
