"""What encoders are used for: vectors of texts, and guesses of what stands in masked places.

A text is framed as in training, [CLS] text [SEP], and shorter ones of a batch are padded on the right.

Letters: B texts, N length, E model dim.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from lin_attn.data.special_tokens import SpecialTokens
from lin_attn.data.tokenizer import Tokenizer
from models.encoder import BertEncoder
from models.generation import in_evaluation_mode
from models.padding import Text, batches, pad, text_list, tokenizer_of
from models.pooled import Pooling, check_pooling, pool

if TYPE_CHECKING:
    from models.masked_lm import MaskedLM
    from models.training import TrainedModel

BATCH_SIZE = 32
MARKER = "[MASK]"


class Guess(NamedTuple):
    """What may stand in a masked place.

    Attributes:
        text: of the token; bytes that are no whole character are replacement characters.
        probability: among all tokens of the model.
        token: its id.
    """

    text: str
    probability: float
    token: int


class TextEncoder:
    """`embed`, for models whose body is an encoder."""

    def embed(
        self, texts: Sequence[Text], pooling: Pooling = "mean", *, framed: bool = True, batch_size: int = BATCH_SIZE
    ) -> Tensor:
        """Vectors of texts, from the encoder's last hidden states.

        Args:
            texts: of which each is computed as it would be alone.
            pooling: mean, over all tokens of a text, or first, the state of its first token.
            framed: with the class token before and the separator after each, as texts of a MaskedCorpus are by default.
            batch_size: how many are computed together. It changes no vector.

        Returns:
            (B, d_model) float32, a row a text.

        Raises:
            ValueError: for an argument out of range, or a tokenizer without these tokens.
        """
        texts = text_list(texts)
        check_pooling(pooling)
        model = cast("TrainedModel", self)
        encoder, tokenizer = cast(BertEncoder, model.get_submodule(model.body)), tokenizer_of(model)
        rows = [frame(tokenizer, tokenizer.encode(text).tolist(), framed) for text in texts]
        if empty := [place for place, row in enumerate(rows) if not row]:
            raise ValueError(f"texts have no token at places {empty[:5]}; wanted text, or framed=True")
        found = torch.empty(len(rows), encoder.config.d_model, device=model.device)
        with in_evaluation_mode(model), torch.no_grad():
            for places in batches([len(row) for row in rows], batch_size):
                tokens, key_mask = pad(
                    [rows[place] for place in places], tokenizer.end_id, side="right", device=model.device
                )
                found[places] = pool(encoder(tokens, key_mask).float(), key_mask, pooling)
        return found


def fill_mask(
    model: "MaskedLM", text: str, top_k: int = 5, *, marker: str = MARKER, framed: bool = True
) -> list[list[Guess]]:
    """The likeliest tokens in each marked place; see `MaskedLM.fill_mask`."""
    if top_k < 1:
        raise ValueError(f"top_k is {top_k}; wanted at least 1")
    if not isinstance(text, str) or not marker or marker not in text:
        raise ValueError(f"text is {text!r}; wanted one with the marker {marker!r} where a token is to be guessed")
    tokenizer = tokenizer_of(model)
    if not isinstance(tokenizer, SpecialTokens) or "mask" not in tokenizer.ids:
        raise ValueError(
            f"the tokenizer {type(tokenizer).__name__} has no mask token by name; wanted a SpecialTokens, such as a "
            "model takes from a MaskedCorpus"
        )
    parts = [tokenizer.encode(part).tolist() for part in text.split(marker)]
    row, places = list(parts[0]), []
    for part in parts[1:]:
        places.append(len(row))
        row += [tokenizer.ids["mask"], *part]
    before = len(frame(tokenizer, [], framed)) // 2
    row, places = frame(tokenizer, row, framed), [before + place for place in places]
    known = np.arange(min(tokenizer.vocab_size, model.network_config.vocab_size))
    ordinary = np.setdiff1d(known, tokenizer.special_ids)
    with in_evaluation_mode(model), torch.no_grad():
        hidden = model.network(torch.tensor([row], device=model.device))[0, places]
        probabilities = model.head(hidden).float().softmax(-1)[:, torch.from_numpy(ordinary).to(model.device)]
        best = probabilities.topk(min(top_k, len(ordinary)), dim=-1)
    return [
        [Guess(_text(tokenizer, int(ordinary[i])), p, int(ordinary[i])) for p, i in zip(*place, strict=True)]
        for place in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def frame(tokenizer: Tokenizer, tokens: list[int], framed: bool) -> list[int]:
    """[CLS] tokens [SEP], or the tokens alone.

    Raises:
        ValueError: if the tokenizer has no such tokens.
    """
    if not framed:
        return tokens
    if not isinstance(tokenizer, SpecialTokens) or not {"class", "separator"} <= set(tokenizer.ids):
        raise ValueError(
            f"framed is True and the tokenizer {type(tokenizer).__name__} has no class and separator tokens by name; "
            "wanted a SpecialTokens, such as a model takes from a MaskedCorpus, or framed=False"
        )
    return [tokenizer.ids["class"], *tokens, tokenizer.ids["separator"]]


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.decode([token]).decode("utf-8", "replace")
