"""Models of this zoo in EleutherAI's lm-evaluation-harness (Gao et al., doi 10.5281/zenodo.10256836), as "lin-attn".

A context is read as the beginning of a document, after the end token of the one before, as in training. Rolling
log-likelihood is of the whole text with the state carried, without windows, where the network has no last position.

Importing this module registers the class; lm_eval has to be installed: pip install 'lin-attn[lm-eval]'.
"""

import json
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm  # type: ignore[import-untyped]

from models import CausalLM, from_pretrained
from models.completion import complete_prompts
from models.generation import takes_left_padding
from models.padding import batches, tokenizer_of
from models.scoring import Score, score_tokens

logger = logging.getLogger(__name__)
MAX_NEW_TOKENS = 256  # of a task that does not say
SAMPLING = ("temperature", "top_k", "top_p", "repetition_penalty")


@register_model("lin-attn")
class LinAttnLM(TemplateLM):  # type: ignore[misc]
    """A causal language model for the harness.

    Args:
        pretrained: the model, or what `from_pretrained` takes: a name, a folder, a .ckpt file, or OWNER/NAME.
        batch_size: how many requests are computed together. It changes no result beyond rounding.
        device: where a model that is named goes; auto is the fastest there is.
        max_length: tokens that are seen at once; longer contexts lose their beginning. By default the network's own
            limit, which only learned positions have.

    Raises:
        ValueError: for an argument out of range, or a model that cannot be had or has no tokenizer.
    """

    def __init__(
        self,
        pretrained: str | CausalLM,
        batch_size: int | str = 16,
        device: str = "auto",
        max_length: int | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if max_batch_size is not None or not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ValueError(
                f"batch_size is {batch_size!r} and max_batch_size {max_batch_size}; wanted a number of at least 1, and "
                "no max_batch_size: nothing is tried out"
            )
        if not isinstance(pretrained, CausalLM):
            from models.cli.opening import find_device

            pretrained = from_pretrained(pretrained, device=find_device(device), kind=CausalLM)
        self.model, self.batch_size = pretrained, int(batch_size)
        self._tokens = tokenizer_of(self.model)
        limits = [one for one in (max_length, self.model.network_config.max_length) if one is not None]
        if limits and min(limits) < 1:
            raise ValueError(f"max_length is {max_length}; wanted at least 1")
        self.max_length = min(limits, default=None)
        self._device = self.model.device

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document, and stands before one."""
        return self._tokens.end_id

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's fingerprint, for caches of requests."""
        return self._tokens.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The tokens of a text, without an end token."""
        return list(self._tokens.encode(string).tolist())

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """log p of whole texts, without their end, in nats."""
        texts = [request.args[0] for request in requests]
        windows = [self._windows(self.tok_encode(text)) for text in texts]
        owners = [place for place, own in enumerate(windows) for _ in own]
        found = self._score([window for own in windows for window in own], disable_tqdm)
        sums = [0.0] * len(texts)
        for place, score in zip(owners, found, strict=True):
            sums[place] -= score.nats
        for text, total in zip(texts, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations up to a stop text or the document's end, the stop left out."""
        found = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(place)
        with tqdm(total=len(requests), desc="generate_until", disable=disable_tqdm) as bar:
            for places in groups.values():
                options, length = _options(requests[places[0]].args[1])
                prompts = [self._prompt(requests[place].args[0], length) for place in places]
                equal = not takes_left_padding(self.model.network_config)
                for rows in batches([len(prompt) for prompt in prompts], self.batch_size, equal=equal):
                    texts = complete_prompts(
                        self.model, [prompts[row] for row in rows], length, batch_size=self.batch_size, **options
                    )
                    for row, text in zip(rows, texts, strict=True):
                        found[places[row]] = text
                        self.cache_hook.add_partial("generate_until", requests[places[row]].args, text)
                    bar.update(len(rows))
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """log p of each continuation given its context, and whether greedy choice gives it."""
        found = self._score([(context, continuation) for _, context, continuation in requests], disable_tqdm)
        answers = [(-score.nats, score.greedy) for score in found]
        for (request, _, _), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", request, answer)
        return answers

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]], disable_tqdm: bool) -> list[Score]:
        sequences = [self._sequence(context, continuation) for context, continuation in pairs]
        found = [Score(0.0, 0, True)] * len(sequences)
        with tqdm(total=len(sequences), desc="log-likelihood", disable=disable_tqdm) as bar:
            for places in batches([len(tokens) for tokens, _ in sequences], self.batch_size):
                scores = score_tokens(self.model, [sequences[i] for i in places], batch_size=self.batch_size)
                for place, score in zip(places, scores, strict=True):
                    found[place] = score
                bar.update(len(places))
        return found

    def _sequence(self, context: list[int], continuation: list[int]) -> tuple[Any, int]:
        """Tokens, and the place of the first that counts; a context that is too long loses its beginning."""
        context = self._after_end(context)
        if self.max_length is not None:
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"a continuation has {len(continuation)} tokens; wanted at most max_length {self.max_length}"
                )
            context = self._fitting(context, self.max_length + 1 - len(continuation))
        return np.array(context + continuation, dtype=np.int64), len(context)

    def _prompt(self, context: str, new_tokens: int) -> list[int]:
        prompt = self._after_end(self.tok_encode(context))
        if self.max_length is None:
            return prompt
        if new_tokens > self.max_length:
            raise ValueError(f"max_gen_toks is {new_tokens}; wanted at most max_length {self.max_length}")
        return self._fitting(prompt, self.max_length + 1 - new_tokens)

    def _after_end(self, tokens: list[int]) -> list[int]:
        end = self._tokens.end_id
        return tokens if tokens[:1] == [end] else [end, *tokens]

    def _fitting(self, context: list[int], room: int) -> list[int]:
        if len(context) > room:
            logger.warning("a context of %d tokens loses its first %d: max_length", len(context), len(context) - room)
        return context[max(len(context) - room, 0) :]

    def _windows(self, tokens: list[int]) -> list[tuple[list[int], list[int]]]:
        """A text as one continuation of the end token, or in windows where there is a last position."""
        if self.max_length is None or len(tokens) <= self.max_length:
            return [([self._tokens.end_id], tokens)]
        found = get_rolling_token_windows(tokens, self._tokens.end_id, self.max_length, 1)
        return [make_disjoint_window(window) for window in found]


def _options(given: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """What `complete` takes of a task's generation_kwargs, and the number of new tokens.

    Raises:
        ValueError: for one that it has not.
    """
    kwargs: dict[str, Any] = dict(normalize_gen_kwargs(given, MAX_NEW_TOKENS))
    until, length, draws = kwargs.pop("until"), kwargs.pop("max_gen_toks"), kwargs.pop("do_sample")
    if unknown := sorted(set(kwargs) - set(SAMPLING)):
        known = ", ".join(("until", "max_gen_toks", "do_sample", *SAMPLING))
        raise ValueError(f"generation_kwargs have {', '.join(unknown)}; wanted some of {known}")
    kwargs.setdefault("temperature", 1.0 if draws else 0.0)
    if kwargs["temperature"] == 0:  # in the harness's terms: greedy, whatever else a task says of draws
        kwargs = {name: value for name, value in kwargs.items() if name not in ("top_k", "top_p")}
    return kwargs | {"stop": until}, length
