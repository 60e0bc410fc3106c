"""Text as packed blocks of tokens: sources, tokenizer, token store, blocks and the LightningDataModule.

Names are loaded on first use, so that `lin_attn.data.tokenizer` can be imported without Lightning.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lin_attn.data.corpus import TextCorpus
    from lin_attn.data.tokenizer import ByteTokenizer

__all__ = ["ByteTokenizer", "TextCorpus"]


def __getattr__(name: str) -> Any:
    if name == "TextCorpus":
        from lin_attn.data.corpus import TextCorpus

        return TextCorpus
    if name == "ByteTokenizer":
        from lin_attn.data.tokenizer import ByteTokenizer

        return ByteTokenizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
