"""Text as packed blocks of tokens, and as examples: sources, tokenizers, stores and LightningDataModules.

Names are loaded on first use, so that `lin_attn.data.tokenizer` can be imported without Lightning.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lin_attn.data.classification import ClassificationData
    from lin_attn.data.corpus import TextCorpus
    from lin_attn.data.masked import MaskedCorpus
    from lin_attn.data.ranking import RankingData
    from lin_attn.data.special_tokens import SpecialTokens
    from lin_attn.data.streaming import StreamingCorpus
    from lin_attn.data.subword import SubwordTokenizer
    from lin_attn.data.tokenizer import ByteTokenizer
    from lin_attn.data.translation import TranslationData

__all__ = [
    "ByteTokenizer",
    "ClassificationData",
    "MaskedCorpus",
    "RankingData",
    "SpecialTokens",
    "StreamingCorpus",
    "SubwordTokenizer",
    "TextCorpus",
    "TranslationData",
]

_HOMES = {
    "ByteTokenizer": "tokenizer",
    "ClassificationData": "classification",
    "MaskedCorpus": "masked",
    "RankingData": "ranking",
    "SpecialTokens": "special_tokens",
    "StreamingCorpus": "streaming",
    "SubwordTokenizer": "subword",
    "TextCorpus": "corpus",
    "TranslationData": "translation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"lin_attn.data.{_HOMES[name]}"), name)
