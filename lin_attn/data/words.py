"""Words as tokens, with fallback to characters, as in WoBERT (Su 2020), with which RoFormer's Chinese model begins.

    a word that is in the vocabulary      one token
    any other                             its characters, each a token
    a character that is not in it         its UTF-8 (<0xE4> …), or [UNK] where a given vocabulary has no bytes

Words are runs of letters and digits or of other signs, between white space: so are those of a text that was cut into
words before, whatever its language. "jieba" cuts each run of letters into Chinese words first (without its model of
unknown words, as in WoBERT). White space itself has no token.
"""

import os
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from itertools import islice
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from lin_attn.data.bpe import END_TOKEN, SAMPLE_BYTES, sample
from lin_attn.data.documents import Document
from lin_attn.data.subword import SubwordTokenizer

SEGMENTERS = ("words", "jieba")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
UNKNOWN = "[UNK]"


class JiebaTokenizer(SubwordTokenizer):
    """A tokenizer of the `tokenizers` library whose words are those that jieba finds.

    Args:
        definition: The contents of a tokenizer.json, in which jieba, which has no place there, is left out.
        end_token: Which token ends a document.

    Raises:
        ValueError: jieba is not installed, or as for `SubwordTokenizer`.
    """

    def __init__(self, definition: str, end_token: str) -> None:
        super().__init__(definition, end_token)
        self._version = jieba_version()
        self._tokenizer.pre_tokenizer = pre_tokenizer("jieba")

    def __reduce__(self) -> tuple[Any, ...]:
        return JiebaTokenizer, (self._definition, self._end_token)

    @property
    def fingerprint(self) -> str:
        """That of the definition, and the version of jieba, whose dictionary goes with it."""
        return f"jieba {self._version} {super().fingerprint}"

    def to_dict(self) -> dict[str, Any]:
        """The tokenizer's definition and end token: strings."""
        return super().to_dict() | {"name": "jieba"}


def train_words(
    documents: Iterable[Document],
    vocab_size: int,
    special_tokens: Iterable[str] = (),
    end_token: str = END_TOKEN,
    segmenter: str = "words",
) -> SubwordTokenizer:
    """A vocabulary of the commonest words and characters; the same text gives the same one.

    Ids: 0 is the end token, then the 256 bytes, then words and characters by their number, then other special tokens.

    Args:
        documents: The text. Of more than 128 MiB, evenly spaced chunks are used.
        vocab_size: Number of tokens, all special tokens included. Fewer come of text with fewer words.
        special_tokens: Kept whole wherever they stand in text.
        end_token: Ends a document, and is never found in text.
        segmenter: "words", or "jieba" for Chinese text that is not cut into words.

    Raises:
        ValueError: jieba is wanted and not installed.
    """
    special = list(special_tokens)
    splitter, words, characters = pre_tokenizer(segmenter), Counter[str](), Counter[str]()
    for chunk in sample(documents, SAMPLE_BYTES):
        words.update(word for word, _ in splitter.pre_tokenize_str(chunk.decode("utf-8", "ignore")))
    for word, count in words.items():
        characters.update({letter: count * number for letter, number in Counter(word).items()})
    counts = words | characters  # a character that is a word too comes as often as the character
    first = [end_token, *BYTES]
    by_count = sorted((word for word in counts if word not in first), key=lambda word: (-counts[word], word))
    vocabulary = [*first, *islice(by_count, max(vocab_size - len(special) - len(first), 0))]
    return _make(vocabulary, end_token, segmenter, special)


def open_words(path: str, segmenter: str, end_token: str | None, end_tokens: Iterable[str] = ()) -> SubwordTokenizer:
    """A tokenizer with a given vocabulary.

    Text is put into lower case where no token but those in brackets has a capital letter, as with BERT's vocabularies
    of that kind.

    Args:
        path: A file with a token a line; its id is the number of its line, from 0. It has a line [UNK], or the 256
            bytes as <0x00> … <0xFF>.
        segmenter: "words" or "jieba".
        end_token: Ends a document; one that is not in the file gets the next id.
        end_tokens: What end_token may be where it is None; the first that is in the file, or else the first.

    Raises:
        ValueError: The file cannot be read or is no such vocabulary, or jieba is wanted and not installed.
    """
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            vocabulary = file.read().removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the vocabulary {path!r}: {error}; wanted a file with a token a line") from None
    twice = [word for word, count in Counter(vocabulary).items() if count > 1]
    if twice or "" in vocabulary:
        what = f"{twice[0]!r} twice" if twice else "an empty line"
        raise ValueError(f"the vocabulary {path!r} has {what}; wanted a token a line, each once")
    if UNKNOWN not in vocabulary and not set(BYTES) <= set(vocabulary):
        raise ValueError(f"the vocabulary {path!r} has no token for what is not in it; wanted a line {UNKNOWN}")
    end = end_token or next((token for token in end_tokens if token in vocabulary), next(iter(end_tokens), END_TOKEN))
    lower = not any(word != word.lower() for word in vocabulary if word[0] not in "[<")
    return _make([*vocabulary, *([end] if end not in vocabulary else [])], end, segmenter, (), lower)


def pre_tokenizer(segmenter: str) -> pre_tokenizers.PreTokenizer:
    """What cuts a text into words.

    Raises:
        ValueError: jieba is wanted and not installed.
    """
    assert segmenter in SEGMENTERS
    if segmenter == "words":
        return pre_tokenizers.Whitespace()
    jieba_version()
    return pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.PreTokenizer.custom(_Jieba())])


def jieba_version() -> str:
    """The version of jieba.

    Raises:
        ValueError: It is not installed.
    """
    try:
        return version("jieba")
    except ImportError:
        raise ValueError(
            "tokenizer jieba cuts Chinese text with the package jieba, which is not installed; wanted "
            "`pip install lin-attn[chinese]`, or tokenizer words and text that has spaces between words"
        ) from None


class _Jieba:
    """Cuts what the `tokenizers` library hands it."""

    def __init__(self) -> None:
        import jieba

        self._words = jieba.Tokenizer()
        jieba.setLogLevel("WARNING")  # it says how long it takes to read its dictionary

    def pre_tokenize(self, text: Any) -> None:
        """Cuts each part of a text."""
        text.split(self._cut)

    def _cut(self, index: int, part: Any) -> list[Any]:
        return [part[start:stop] for _, start, stop in self._words.tokenize(str(part), HMM=False)]


def _make(
    vocabulary: list[str], end_token: str, segmenter: str, special: Iterable[str], lower: bool = False
) -> SubwordTokenizer:
    ids = {word: index for index, word in enumerate(vocabulary)}
    # A BPE without merges: a whole word if it is there (ignore_merges), else its characters, else their bytes.
    has_bytes = set(BYTES) <= set(ids)
    unknown = {} if has_bytes else {"unk_token": UNKNOWN}
    tokenizer = Tokenizer(models.BPE(ids, [], ignore_merges=True, byte_fallback=has_bytes, **unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if lower:
        tokenizer.normalizer = normalizers.Lowercase()
    joined = decoders.Fuse() if segmenter == "jieba" else decoders.WordPiece(prefix="##", cleanup=True)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), joined])
    tokenizer.add_special_tokens([end_token])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in special])
    kind = JiebaTokenizer if segmenter == "jieba" else SubwordTokenizer
    return kind(tokenizer.to_str(), end_token)
