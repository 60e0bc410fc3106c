"""Training a byte-level BPE vocabulary on a corpus (Sennrich et al. 2016, arXiv 1508.07909; words as in GPT-2)."""

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from lin_attn.data.chunks import cut
from lin_attn.data.documents import Document
from lin_attn.data.subword import SubwordTokenizer

END_TOKEN = "<|endoftext|>"
# Text that a vocabulary is learned from: more of it changes the rare merges only.
SAMPLE_BYTES = 1 << 27


def train_bpe(
    documents: Iterable[Document], vocab_size: int, special_tokens: Iterable[str] = (), end_token: str = END_TOKEN
) -> SubwordTokenizer:
    """Learns a vocabulary of the 256 bytes and the commonest merges; the same text gives the same vocabulary.

    Ids: 0 is the end token, then bytes and merges, then the other special tokens.

    Args:
        documents: The text. Of more than 128 MiB, evenly spaced chunks are used.
        vocab_size: Number of tokens, all special tokens included. Fewer come of text with fewer repeated parts.
        special_tokens: Kept whole wherever they stand in text.
        end_token: Ends a document, and is never found in text.
    """
    special = list(special_tokens)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special),
        min_frequency=2,
        special_tokens=[end_token],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (chunk.decode("utf-8", "ignore") for chunk in sample(documents, SAMPLE_BYTES))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in special])
    return SubwordTokenizer(tokenizer.to_str(), end_token)


def sample(documents: Iterable[Document], limit: int) -> list[bytes]:
    """At most `limit` bytes of a text of unknown size: every chunk, or every second, fourth, ..."""
    kept: list[bytes] = []
    size, stride = 0, 1
    for index, chunk in enumerate(chunk for document in documents for chunk in cut(document.pieces)):
        if index % stride == 0:
            kept.append(chunk)
            size += len(chunk)
        if size > limit:
            kept, stride = kept[::2], 2 * stride
            size = sum(map(len, kept))
    return kept
