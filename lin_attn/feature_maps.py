"""Feature maps φ of kernelized attention, each with its vector-Jacobian product.

    weight of key n for query m:  φ(q_m)ᵀ φ(k_n)                 (Katharopoulos et al. 2020, arXiv 2006.16236, eq. 4)

The derivative is written out beside each map so that an op can recompute φ in its backward pass instead of keeping
φ(q) and φ(k). Both functions work element by element or along the last axis, on (…, D), and give (…, D): per head,
since the head is one of the leading axes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor


@dataclass(frozen=True)
class FeatureMap:
    """A named map φ: (…, D) → (…, D) and its derivative.

    Attributes:
        name: what `feature_map(name)` finds it by.
        forward: x → φ(x), in x's dtype. Ops call it in float32 at least.
        vjp: (x, gradient with respect to φ(x)) → gradient with respect to x.
    """

    name: str
    forward: Callable[[Tensor], Tensor]
    vjp: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """φ(x), computed in float32 (float64 for float64) and returned in x's dtype."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return self.forward(x.to(wide)).to(x.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a named map, pickled or deep, is that map itself: by identity it is known to the kernels."""
        if is_registered(self):
            return feature_map, (self.name,)
        return FeatureMap, (self.name, self.forward, self.vjp)


def _elu1(x: Tensor) -> Tensor:
    # x + 1 for x ≥ 0, exp(x) below. `elu(x) + 1` computes exp(x) − 1 + 1 there, which cancels to 0 for x ≲ −17 in
    # float32 and x ≲ −6 in bfloat16; exp of the unclamped x would overflow where it is not wanted.
    return torch.relu(x) + x.clamp(max=0).exp()


def _elu1_vjp(x: Tensor, grad: Tensor) -> Tensor:
    return grad * x.clamp(max=0).exp()  # exp(0) = 1 is the slope of the other branch


def _relu_vjp(x: Tensor, grad: Tensor) -> Tensor:
    return grad * (x > 0)


def _squared_relu(x: Tensor) -> Tensor:
    return torch.relu(x).square()


def _squared_relu_vjp(x: Tensor, grad: Tensor) -> Tensor:
    return grad * (2 * torch.relu(x))


def _stable_exp(x: Tensor) -> Tensor:
    # The largest entry of each vector is taken off that vector alone: the result lies in (0, 1] whatever comes, and
    # since no other key is looked at, the map is causal and streams. A maximum over all keys would be neither.
    return (x - x.amax(dim=-1, keepdim=True)).exp()


def _stable_exp_vjp(x: Tensor, grad: Tensor) -> Tensor:
    peak = x.amax(dim=-1, keepdim=True)
    grad = grad * (x - peak).exp()
    at_peak = x == peak  # ties share the gradient of the maximum, as in torch.amax
    return grad - at_peak * (grad.sum(-1, keepdim=True) / at_peak.sum(-1, keepdim=True))


_FEATURE_MAPS = {
    phi.name: phi
    for phi in (
        FeatureMap("elu1", _elu1, _elu1_vjp),
        FeatureMap("relu", torch.relu, _relu_vjp),
        FeatureMap("squared_relu", _squared_relu, _squared_relu_vjp),
        FeatureMap("exp", _stable_exp, _stable_exp_vjp),
        FeatureMap("identity", lambda x: x, lambda x, grad: grad),
    )
}


def is_registered(phi: object) -> TypeGuard[FeatureMap]:
    """Whether phi is one of the named maps itself, and not merely alike."""
    return any(phi is known for known in _FEATURE_MAPS.values())


def feature_map(name: str) -> FeatureMap:
    """Looks a feature map up by its name.

    Args:
        name: one of
            "elu1": elu(x) + 1, i.e. x + 1 for x ≥ 0 and exp(x) below (Katharopoulos et al. 2020, eq. 7);
            "relu": max(x, 0);
            "squared_relu": max(x, 0)² (So et al. 2021, arXiv 2109.08668);
            "exp": exp(x − max_i x_i), the exponential in a form that is stable per query and per key; a key's
                weight then depends on the differences between its entries, not on their common level;
            "identity": x.

    Returns:
        The map, callable on tensors of shape (…, D).

    Raises:
        ValueError: if no map has that name.
    """
    if not isinstance(name, str) or name not in _FEATURE_MAPS:
        raise ValueError(f"feature_map is {name!r}; wanted one of {', '.join(map(repr, _FEATURE_MAPS))}")
    return _FEATURE_MAPS[name]
