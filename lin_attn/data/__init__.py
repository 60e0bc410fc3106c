"""Text as packed blocks of tokens: sources, tokenizer, token store, blocks and the LightningDataModule.

Names are loaded on first use, so that `lin_attn.data.tokenizer` can be imported without Lightning.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lin_attn.data.corpus import TextCorpus
    from lin_attn.data.masked import MaskedCorpus
    from lin_attn.data.special_tokens import SpecialTokens
    from lin_attn.data.streaming import StreamingCorpus
    from lin_attn.data.subword import SubwordTokenizer
    from lin_attn.data.tokenizer import ByteTokenizer

__all__ = ["ByteTokenizer", "MaskedCorpus", "SpecialTokens", "StreamingCorpus", "SubwordTokenizer", "TextCorpus"]

_HOMES = {
    "ByteTokenizer": "tokenizer",
    "MaskedCorpus": "masked",
    "SpecialTokens": "special_tokens",
    "StreamingCorpus": "streaming",
    "SubwordTokenizer": "subword",
    "TextCorpus": "corpus",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"lin_attn.data.{_HOMES[name]}"), name)
