"""Continuing texts: text to tokens, tokens back to text as they are drawn, and an end at a stop text.

A prompt is read as the beginning of a document: the end token of the document before, then the text.
"""

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lin_attn.data.tokenizer import Tokenizer
from models.generation import seeds_of, takes_left_padding
from models.padding import Text, batches, pad, text_list, tokenizer_of

if TYPE_CHECKING:
    from models.causal_lm import CausalLM

BATCH_SIZE = 32
PRIMED = 16  # tokens of a prompt that may change how the next one reads


class StopTexts:
    """Lets text through, piece by piece, up to the first of the stop texts, which may be spread over several pieces.

    What could be the beginning of a stop is held back until it is known. The first stop is the one that is complete
    first, and the longest of several; so the cut does not depend on how the text comes in pieces.

    Args:
        stops: texts, none of them empty.

    Raises:
        ValueError: if one is empty, or stops is a text itself.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        listed = isinstance(stops, Iterable) and not isinstance(stops, str)
        self.stops = tuple(stops) if listed else ()
        if not listed or not all(isinstance(stop, str) and stop for stop in self.stops):
            raise ValueError(f"stop is {stops!r}; wanted a list of texts, none of them empty")
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """What of the text so far is known to come before a stop, and has not been given out yet."""
        if self.found:
            return ""
        held = self._held + piece
        places = [(held.index(stop) + len(stop), -len(stop)) for stop in self.stops if stop in held]
        if places:
            self.found, self._held = True, ""
            end, less = min(places)
            return held[: end + less]
        keep = max((n for stop in self.stops for n in range(1, len(stop)) if held.endswith(stop[:n])), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """What was held back, at the end of the text."""
        rest, self._held = self._held, ""
        return rest


class TokenText:
    """The text of tokens that come one by one; a character of several bytes comes when it is whole.

    Args:
        tokenizer: of the tokens. Its end token ends the text.
        stops: of StopTexts.
        prompt: the tokens before, whose text is not given out; a word's blank may be known only after them.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), prompt: Sequence[int] = ()) -> None:
        self._end, self._to_bytes = tokenizer.end_id, tokenizer.stream_decoder()
        for token in prompt[-PRIMED:]:
            self._to_bytes(token)
        self._to_text = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopTexts(stops)
        self.ended = False

    def add(self, token: int) -> str:
        """The text that the token adds, as far as it is known to come before a stop."""
        if self.ended:
            return ""
        if token == self._end:
            return self.finish()
        piece = self._stops.add(self._to_text.decode(self._to_bytes(token)))
        self.ended = self._stops.found
        return piece

    def finish(self) -> str:
        """What is left at the end of the tokens."""
        if self.ended:
            return ""
        self.ended = True
        return self._stops.add(self._to_text.decode(b"", final=True)) + self._stops.finish()


def complete(model: "CausalLM", texts: Sequence[Text], max_new_tokens: int, **options: Any) -> list[str]:
    """The continuations of texts; see `CausalLM.complete`."""
    texts = text_list(texts)
    tokenizer = tokenizer_of(model)
    return complete_prompts(model, [prompt_tokens(tokenizer, text) for text in texts], max_new_tokens, **options)


def complete_prompts(
    model: "CausalLM",
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    *,
    stop: Sequence[str] = (),
    on_text: Callable[[int, str], None] | None = None,
    batch_size: int = BATCH_SIZE,
    seed: int | Sequence[int] | None = None,
    **options: Any,
) -> list[str]:
    """The texts of the continuations of prompts, which are tokens, none of them empty; as `complete` otherwise."""
    stop = StopTexts(stop).stops  # a mistake is told before anything is drawn
    seeds = None if seed is None else seeds_of(seed, len(prompts), "text")
    found = [""] * len(prompts)
    mixed = takes_left_padding(model.network_config)
    for rows in batches([len(prompt) for prompt in prompts], batch_size, equal=not mixed):
        own = None if seeds is None else [seeds[row] for row in rows]
        pieces = _pieces(model, [prompts[row] for row in rows], max_new_tokens, stop, seed=own, **options)
        for place, piece in pieces:
            found[rows[place]] += piece
            if on_text is not None:
                on_text(rows[place], piece)
    return found


def stream_text(
    model: "CausalLM", text: Text, max_new_tokens: int, *, stop: Sequence[str] = (), **options: Any
) -> Iterator[str]:
    """The pieces of one text's continuation; see `CausalLM.stream_text`."""
    prompt = prompt_tokens(tokenizer_of(model), text)
    return (piece for _, piece in _pieces(model, [prompt], max_new_tokens, stop, **options))


def prompt_tokens(tokenizer: Tokenizer, text: Text) -> list[int]:
    """A text as the beginning of a document: the end of the one before, and its tokens."""
    return [tokenizer.end_id, *tokenizer.encode(text).tolist()]


def _pieces(
    model: "CausalLM", prompts: list[list[int]], max_new_tokens: int, stops: Sequence[str], **options: Any
) -> Iterator[tuple[int, str]]:
    """Rows and pieces of their texts, none empty, as they are drawn."""
    tokenizer = tokenizer_of(model)
    texts = [TokenText(tokenizer, stops, prompt) for prompt in prompts]
    tokens, key_mask = pad(prompts, tokenizer.end_id, side="left", device=model.device)
    drawn = model.stream(tokens, max_new_tokens, key_mask=key_mask, stop_token=tokenizer.end_id, **options)

    def pieces() -> Iterator[tuple[int, str]]:
        for new in drawn:
            for row, token in enumerate(new.tolist()):
                yield row, texts[row].add(token)
            if all(text.ended for text in texts):
                break
        for row, text in enumerate(texts):
            yield row, text.finish()

    return ((row, piece) for row, piece in pieces() if piece)
