"""Where the words of a vocabulary begin and end, for whole-word masking.

bytes, byte-level BPE   a word is a run of letters, digits, underscores and bytes above 127
WordPiece               a token with the prefix ## goes on with the word before it
Unigram, Metaspace      a token without ▁ goes on
words, with fallback    every word is one token, or a run of characters between two white spaces that is not known: its
                        characters cannot be told from words of one character, and stand for themselves
"""

import json

import numpy as np

from lin_attn.data.masking import Words
from lin_attn.data.special_tokens import SpecialTokens
from lin_attn.data.subword import SubwordTokenizer
from lin_attn.data.tokenizer import ByteTokenizer, Tokenizer


def words_of(tokenizer: SpecialTokens) -> Words:
    """Which tokens go on with a word; special tokens stand alone.

    Raises:
        ValueError: The tokenizer's vocabulary does not say.
    """
    begins, ends = np.zeros((2, tokenizer.vocab_size), dtype=bool)
    for index, (inside_first, inside_last) in enumerate(_edges(tokenizer.tokenizer)):
        begins[index], ends[index] = inside_first, inside_last
    begins[tokenizer.special_ids] = ends[tokenizer.special_ids] = False
    return Words(begins, ends)


def _edges(tokenizer: Tokenizer) -> list[tuple[bool, bool]]:
    """For each token whether it may go on with the word before it, and whether the next may go on with its word."""
    if isinstance(tokenizer, ByteTokenizer) or (isinstance(tokenizer, SubwordTokenizer) and tokenizer.is_byte_level):
        texts = [tokenizer.decode([index]) for index in range(tokenizer.vocab_size)]
        return [(_is_inside(text[:1]), _is_inside(text[-1:])) for text in texts]
    assert isinstance(tokenizer, SubwordTokenizer)
    definition = json.loads(tokenizer.to_dict()["json"])
    model, pre_tokenizer = definition["model"], json.dumps(definition["pre_tokenizer"])
    vocabulary = tokenizer.vocabulary
    if model["type"] == "WordPiece" and model["continuing_subword_prefix"]:
        prefix = model["continuing_subword_prefix"]
        return [(token.startswith(prefix), True) for token in vocabulary]
    if '"Metaspace"' in pre_tokenizer:
        return [(not token.startswith("▁"), True) for token in vocabulary]
    if model["type"] == "WordLevel" or (model["type"] == "BPE" and model.get("ignore_merges") and not model["merges"]):
        return [(False, False)] * len(vocabulary)
    raise ValueError(
        f"whole_words is true, and the vocabulary of a {model['type']} tokenizer does not say where words begin; "
        "wanted bytes, a byte-level BPE, WordPiece, Metaspace or words, or whole_words false"
    )


def _is_inside(byte: bytes) -> bool:
    return bool(byte) and (byte.isalnum() or byte == b"_" or byte[0] > 127)
