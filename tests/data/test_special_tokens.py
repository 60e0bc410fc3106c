"""Special tokens have ids of their own, change no text, and come back from where they were saved."""

import json
import pickle

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from lin_attn.data.bpe import train_bpe
from lin_attn.data.documents import Document
from lin_attn.data.special_tokens import WRITTEN, SpecialTokens
from lin_attn.data.subword import SubwordTokenizer
from lin_attn.data.tokenizer import ByteTokenizer, tokenizer_from_dict

TEXT = "what <s> is [MASK] and <pad> here? é 中 <|endoftext|>"


def bert() -> SubwordTokenizer:
    """A tokenizer whose vocabulary has BERT's special tokens, of which [SEP] ends documents."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "what", "is", "here", "##s", "[", "]", "M"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return SubwordTokenizer(tokenizer.to_str(), "[SEP]")


TOKENIZERS = {
    "bytes": ByteTokenizer(),
    "bpe": train_bpe([Document("text", [b"<s> what is here <s> " * 50])], 300),
    "bert": bert(),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_text_is_encoded_and_decoded_as_without_them(name):
    plain = TOKENIZERS[name]
    special = SpecialTokens(plain)
    tokens = special.encode(TEXT)
    np.testing.assert_array_equal(tokens, plain.encode(TEXT))
    [piece] = special.encode_pieces([TEXT.encode()])
    np.testing.assert_array_equal(piece.tokens, tokens)
    added = [index for index in special.ids.values() if index >= plain.vocab_size]
    mixed = np.insert(tokens, len(tokens) // 2, added)
    assert special.decode(mixed) == plain.decode(tokens)
    decoder = special.stream_decoder()
    assert b"".join(decoder(int(token)) for token in mixed) == b"".join(map(plain.stream_decoder(), tokens.tolist()))
    if plain.token_bytes is None:
        assert special.token_bytes is None
    else:
        assert special.token_bytes.shape == (special.vocab_size,)
        assert special.token_bytes[mixed].sum() == len(TEXT.encode())
    with pytest.raises(ValueError, match=f"from 0 to {special.vocab_size - 1}"):
        special.decode([special.vocab_size])


def test_a_vocabulary_that_has_them_keeps_its_ids_and_the_others_come_behind():
    assert SpecialTokens(TOKENIZERS["bytes"]).ids == dict(zip(WRITTEN, range(257, 262), strict=True))
    special = SpecialTokens(TOKENIZERS["bert"])
    assert special.ids == {"pad": 0, "class": 2, "separator": 3, "mask": 4, "begin": 12}
    assert special.vocab_size == 13
    assert special.end_id == 3
    assert special.special_ids.tolist() == [0, 2, 3, 4, 12]
    assert SpecialTokens(TOKENIZERS["bytes"], ["mask", "pad"]).ids == {"mask": 257, "pad": 258}


def test_a_merge_that_reads_like_one_is_text():
    definition = json.loads(TOKENIZERS["bpe"].to_dict()["json"])
    definition["model"]["vocab"] |= {"<s": 400, "<s>": 401}
    definition["model"]["merges"] = [["<", "s"], ["<s", ">"]]
    definition["pre_tokenizer"]["use_regex"] = False
    tokenizer = SubwordTokenizer(json.dumps(definition), "<|endoftext|>")
    assert tokenizer.encode("<s>").tolist() == [401]
    assert SpecialTokens(tokenizer, ["begin"]).ids == {"begin": 402}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_it_comes_back_from_plain_values_and_its_fingerprint_tells_it_from_others(name):
    special = SpecialTokens(TOKENIZERS[name], ["mask", "begin"])
    for back in (
        tokenizer_from_dict(json.loads(json.dumps(special.to_dict()))),
        pickle.loads(pickle.dumps(special)),
    ):
        assert back.ids == special.ids
        assert back.fingerprint == special.fingerprint
        np.testing.assert_array_equal(back.encode(TEXT), special.encode(TEXT))
    others = [TOKENIZERS[name], SpecialTokens(TOKENIZERS[name], ["begin", "mask"]), SpecialTokens(TOKENIZERS[name])]
    assert len({special.fingerprint, *(other.fingerprint for other in others)}) == 4


def test_one_that_has_some_is_extended_and_its_ids_stay():
    some = SpecialTokens(TOKENIZERS["bytes"], ["mask"])
    more = SpecialTokens(some, ["pad", "mask"])
    assert more.ids == {"mask": 257, "pad": 258}
    assert isinstance(more.tokenizer, ByteTokenizer)
    assert SpecialTokens(some, ["mask"]).fingerprint == some.fingerprint
    assert more.special_id("[MASK]") == 257
    assert more.special_id("[CLS]") is None


@pytest.mark.parametrize("names", [["mask", "mask"], ["start"]])
def test_names_that_are_unknown_or_come_twice_are_refused(names):
    with pytest.raises(ValueError, match=r"names of special tokens are .*; wanted some of .*'mask'"):
        SpecialTokens(TOKENIZERS["bytes"], names)
