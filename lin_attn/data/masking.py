"""Masking of tokens for a model that guesses them (BERT, Devlin et al. 2019, arXiv 1810.04805, §3.1 and appendix A.1).

Of the n places of a text that may be masked, round(p · n), but at least one, are chosen at random. Of the chosen ones
80 % get the mask token, 10 % a random token, 10 % stay as they are; the model guesses what stood in all of them.

With whole words (BERT-wwm, Cui et al. 2019, arXiv 1906.08101) places are chosen a word at a time, in random order, and
words that would lead beyond the number are left out. A word that is longer than the number counts as its tokens one by
one, so that no place is safe from being chosen.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lin_attn.data.blocks import IGNORED
from lin_attn.data.tokenizer import Tokens

Flags = npt.NDArray[np.bool_]


class Words(NamedTuple):
    """Which tokens go on with a word: one whose `begins_inside` is True after one whose `ends_inside` is True.

    Attributes:
        begins_inside: (vocab_size,) bool.
        ends_inside: (vocab_size,) bool.
    """

    begins_inside: Flags
    ends_inside: Flags

    def of(self, tokens: Tokens) -> Tokens:
        """The number of the word that each of (n,) tokens is in, from 0: (n,) int64."""
        goes_on = np.zeros(len(tokens), dtype=bool)
        goes_on[1:] = self.begins_inside[tokens[1:]] & self.ends_inside[tokens[:-1]]
        return np.cumsum(~goes_on) - 1


@dataclass(frozen=True)
class Masking:
    """What is done to a text.

    Args:
        ordinary: (vocab_size,) bool: tokens that may be masked, and that a random one is drawn from.
        mask_id: The mask token.
        probability: p, the share of places that are chosen.
        mask_share: Of the chosen places, those that get the mask token.
        random_share: Of the chosen places, those that get a random token.
        words: Of whole-word masking, None for tokens one by one.

    Raises:
        ValueError: A share is out of range.
    """

    ordinary: Flags
    mask_id: int
    probability: float = 0.15
    mask_share: float = 0.8
    random_share: float = 0.1
    words: Words | None = None

    def __post_init__(self) -> None:
        if not 0 < self.probability <= 1:
            raise ValueError(f"mask_probability is {self.probability}; wanted a number above 0 and at most 1")
        shares = (self.mask_share, self.random_share)
        if min(shares) < 0 or sum(shares) > 1 + 1e-9:
            raise ValueError(f"mask_share and random_share are {shares}; wanted numbers ≥ 0 with a sum of at most 1")

    @cached_property
    def vocabulary(self) -> Tokens:
        """What a random token is drawn from."""
        return np.flatnonzero(self.ordinary)

    def __call__(self, text: Tokens, draw: np.random.Generator) -> tuple[Tokens, Tokens]:
        """Masks a text.

        Args:
            text: (n,) tokens.
            draw: Gives all that is random.

        Returns:
            (n,) int64, the text with masks, and (n,) int64, what stood in the chosen places and IGNORED elsewhere.
        """
        tokens, targets = text.astype(np.int64), np.full(len(text), IGNORED, dtype=np.int64)
        free = np.flatnonzero(self.ordinary[text])
        if not len(free):
            return tokens, targets
        count = max(1, round(self.probability * len(free)))
        order = draw.permutation(len(free))
        chosen = free[order[:count]] if self.words is None else self._whole(text, free, order, count)
        targets[chosen] = tokens[chosen]
        kind = draw.random(len(chosen))
        others = self.vocabulary[draw.integers(len(self.vocabulary), size=len(chosen))]
        replaced = np.where(kind < self.mask_share + self.random_share, others, tokens[chosen])
        tokens[chosen] = np.where(kind < self.mask_share, self.mask_id, replaced)
        return tokens, targets

    def _whole(self, text: Tokens, free: Tokens, order: Tokens, count: int) -> Tokens:
        """Places of whole words, `count` in all where words fit, in the random order of their first tokens."""
        assert self.words is not None
        word_of = self.words.of(text)[free]
        long = np.bincount(word_of)[word_of] > count
        word_of[long] = len(text) + np.flatnonzero(long)
        first = np.unique(word_of, return_index=True)[1]
        rank = np.empty(len(free), dtype=np.int64)
        rank[order] = np.arange(len(free))
        chosen: list[Tokens] = []
        for start in first[np.argsort(rank[first])]:
            word = np.flatnonzero(word_of == word_of[start])
            if len(word) <= count:
                chosen.append(word)
                count -= len(word)
            if not count:
                break
        places: Tokens = free[np.concatenate(chosen)]
        return places
