"""Loud: a wrong argument raises ValueError that names it; nothing is swallowed."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lin_attn import KVCache, LinearState, Rotary, linear_attention, softmax_attention
from tests.helpers import BACKENDS

X = torch.randn(2, 4, 5, 6)  # q, k and v where nothing else is said
FEW = torch.randn(2, 3, 5, 6)
MASK = torch.ones(2, 5, dtype=torch.bool)
STATE = LinearState(torch.zeros(2, 4, 6, 6), torch.zeros(2, 4, 6), 5)
CACHE = KVCache(X, X, 5)

BOTH: dict[str, tuple[str, dict[str, Any]]] = {
    # what is wrong: (the argument that the message names, arguments)
    "q of three axes": ("q", {"q": X[0]}),
    "k of three axes": ("k", {"k": X[0]}),
    "v of three axes": ("v", {"v": X[0]}),
    "q of integers": ("q", {"q": X.long()}),
    "k of another dtype": ("k", {"k": X.double()}),
    "v of another dtype": ("v", {"v": X.bfloat16()}),
    "another batch": ("k", {"k": X[:1], "v": X[:1]}),
    "another head_dim": ("k", {"k": X[..., :4]}),
    "heads that do not divide": ("k", {"k": FEW, "v": FEW}),
    "more key heads than query heads": ("k", {"q": X[:, :2]}),
    "no key heads": ("k", {"k": X[:, :0], "v": X[:, :0]}),
    "v of other heads": ("v", {"v": X[:, :2]}),
    "v of another length": ("v", {"v": X[:, :, :4]}),
    "causal with more keys than queries": ("causal", {"q": X[:, :, :3]}),
    "causal with fewer keys than queries": ("causal", {"k": X[:, :, :3], "v": X[:, :, :3]}),
    "mask of floats": ("key_mask", {"key_mask": MASK.float()}),
    "mask of integers": ("key_mask", {"key_mask": MASK.long()}),
    "mask of another length": ("key_mask", {"key_mask": MASK[:, :4]}),
    "mask of another batch": ("key_mask", {"key_mask": MASK[:1]}),
    "mask of four axes": ("key_mask", {"key_mask": MASK[:, None, None]}),
    "rotary of another size": ("rotary", {"rotary": Rotary(4)}),
    "rotary of another kind": ("rotary", {"rotary": torch.nn.Identity()}),
    "rotary by name": ("rotary", {"rotary": "rope"}),
    "state is a tuple": ("state", {"state": (X, X)}),
    "state is a dict": ("state", {"state": {}}),
    "state is a tensor": ("state", {"state": X}),
}
LINEAR = BOTH | {
    "unknown feature map": ("feature_map", {"feature_map": "elu"}),
    "feature map is no callable": ("feature_map", {"feature_map": 3}),
    "feature map is None": ("feature_map", {"feature_map": None}),
    "feature map drops the features": ("feature_map", {"feature_map": lambda x: x.sum(-1)}),
    "feature map drops tokens": ("feature_map", {"feature_map": lambda x: x[:, :, :1]}),
    "feature map swaps axes": ("feature_map", {"feature_map": lambda x: x.transpose(1, 2)}),
    "feature map merges heads": ("feature_map", {"feature_map": lambda x: x.mean(1, keepdim=True)}),
    "rotary of D where φ gives D′": ("rotary", {"feature_map": lambda x: x[..., :4], "rotary": Rotary(6)}),
    "rotary of D′ where it comes before φ": (
        "rotary",
        {"feature_map": lambda x: x[..., :4], "rotary": Rotary(4), "rope": "before"},
    ),
    "unknown rope": ("rope", {"rope": "none"}),
    "rope is a Rotary": ("rope", {"rope": Rotary(6)}),
    "unknown backend": ("backend", {"backend": "cuda"}),
    "backend is None": ("backend", {"backend": None}),
    "negative eps": ("eps", {"eps": -1e-6}),
    "eps is nan": ("eps", {"eps": float("nan")}),
    "state of softmax": ("state", {"state": CACHE}),
    "state of another batch": ("state", {"state": STATE._replace(kv=STATE.kv[:1])}),
    "state of other heads": ("state", {"state": STATE._replace(kv=STATE.kv[:, :2], k_sum=STATE.k_sum[:, :2])}),
    "state whose sums disagree": ("state", {"state": STATE._replace(k_sum=STATE.k_sum[..., :4])}),
    "state in bfloat16": ("state", {"state": STATE._replace(kv=STATE.kv.bfloat16())}),
    "state in float64": ("state", {"state": STATE._replace(kv=STATE.kv.double(), k_sum=STATE.k_sum.double())}),
}
SOFTMAX = BOTH | {
    "bias of another dtype": ("bias", {"bias": torch.zeros(5, 5, dtype=torch.float64)}),
    "bias of booleans": ("bias", {"bias": torch.ones(5, 5, dtype=torch.bool)}),
    "bias of another length": ("bias", {"bias": torch.zeros(5, 4)}),
    "bias that forgets the state": ("bias", {"bias": torch.zeros(5, 5), "state": CACHE}),
    "bias of other heads": ("bias", {"bias": torch.zeros(3, 5, 5)}),
    "bias of five axes": ("bias", {"bias": torch.zeros(1, 1, 1, 5, 5)}),
    "state of linear attention": ("state", {"state": STATE}),
    "state of another batch": ("state", {"state": KVCache(X[:1], X[:1], 5)}),
    "state of another head_dim": ("state", {"state": KVCache(X[..., :4], X, 5)}),
    "state of other heads": ("state", {"state": KVCache(X, X[:, :2], 5)}),
    "state in another dtype": ("state", {"state": KVCache(X.double(), X.double(), 5)}),
    "state whose length is not its keys'": ("state", {"state": KVCache(X, X, 3)}),
    "state whose values are fewer": ("state", {"state": KVCache(X, X[:, :, :3], 5)}),
    "state with a mask of another length": ("state", {"state": KVCache(X, X, 5, MASK[:, :3])}),
    "state with a mask of floats": ("state", {"state": KVCache(X, X, 5, MASK.float())}),
}


def raises(argument: str, op: Callable[..., Tensor], arguments: dict[str, Any]) -> None:
    arguments = {"q": X, "k": X, "v": X} | arguments
    with pytest.raises(ValueError, match=rf"\b{re.escape(argument)}\b"):
        op(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@pytest.mark.parametrize("wrong", LINEAR)
def test_linear_attention_names_the_argument_that_is_wrong(wrong, backend):
    argument, arguments = LINEAR[wrong]
    raises(argument, linear_attention, {"backend": backend} | arguments)


@pytest.mark.parametrize("wrong", SOFTMAX)
def test_softmax_attention_names_the_argument_that_is_wrong(wrong):
    raises(*(SOFTMAX[wrong][0], softmax_attention, SOFTMAX[wrong][1]))


@pytest.mark.parametrize("op", [linear_attention, softmax_attention])
def test_a_typo_or_an_option_of_another_mechanism_is_a_type_error(op):
    for name in ("is_causal", "mask", "cu_seqlens", "dropout"):
        with pytest.raises(TypeError, match=name):
            op(X, X, X, **{name: None})
    with pytest.raises(TypeError):
        op(X, X, X, "elu1")


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_right_raises_nothing(backend):
    """So that the tables above cannot pass by refusing everything."""
    linear_attention(X, X[:, :2], X[:, :2], key_mask=MASK, rotary=Rotary(6), state=None, backend=backend)
    linear_attention(X, X, X, key_mask=MASK, rotary=Rotary(6), state=STATE, eps=0, backend=backend)
    linear_attention(X[:, :, :3], X, X, causal=False, backend=backend)
    softmax_attention(X, X, X, state=CACHE, bias=torch.zeros(5, 10), key_mask=MASK)
    softmax_attention(X[:, :, :3], X, X, causal=False)
