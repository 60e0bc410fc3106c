"""Attention with each position encoding as explicit double loops in float64, differentiable, from the papers' formulas.

They share no code with lin_attn: sums are of scalars, one query and one key at a time. A `Loops` says what the score of
a pair is and what it adds to the value; its parameters are those of the module that it is compared with.

Letters: H heads, m query position, n key position, D head dim.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lin_attn import positions as P
from tests.helpers import rotation_matrix

Score = Callable[[int, int, int, Tensor, Tensor], Tensor]  # (h, m, n, q_m, k_n) → score


@dataclass
class Loops:
    """What a pair's score is, and what is added to its value."""

    score: Score
    value: Callable[[int, int, int], Tensor | float] = field(default=lambda h, m, n: 0.0)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, key_mask: Tensor | None = None
    ) -> Tensor:
        """softmax over n of score, times v_n + value; zeros where no key is visible."""
        batch, heads, length, _ = q.shape
        groups = heads // k.shape[1]
        rows = []
        for b in range(batch):
            for h in range(heads):
                for m in range(length):
                    seen = [
                        n for n in range(m + 1 if causal else k.shape[2]) if key_mask is None or bool(key_mask[b, n])
                    ]
                    row = q.new_zeros(v.shape[3])
                    if seen:
                        scores = [self.score(h, m, n, q[b, h, m], k[b, h // groups, n]) for n in seen]
                        weights = torch.stack(scores).softmax(0)
                        for weight, n in zip(weights, seen, strict=True):
                            row = row + weight * (v[b, h // groups, n] + self.value(h, m, n))
                    rows.append(row)
        return torch.stack(rows).view(batch, heads, length, v.shape[3])


def sines(distance: int, size: int) -> Tensor:
    """Vaswani et al.'s encoding of one position."""
    angles = [distance / 10000 ** (2 * i / size) for i in range(size // 2)]
    return torch.tensor([f(a) for a in angles for f in (math.sin, math.cos)], dtype=torch.float64)


def shaw(module: P.ShawPositions) -> Loops:
    """Eqs. 3–4: a vector for clip(n − m, −L, L) beside the key and beside the value."""
    L = module.max_distance

    def row(m: int, n: int) -> int:
        return max(-L, min(L, n - m)) + L

    def score(h: int, m: int, n: int, q: Tensor, k: Tensor) -> Tensor:
        return q @ (k + module.key_positions.weight[row(m, n)]) / math.sqrt(len(q))

    return Loops(score, lambda h, m, n: module.value_positions.weight[row(m, n)])


def transformer_xl(module: P.TransformerXLPositions) -> Loops:
    """§3.3, the four terms one by one."""

    def score(h: int, m: int, n: int, q: Tensor, k: Tensor) -> Tensor:
        head = slice(h * len(q), (h + 1) * len(q))
        r = module.projection.weight[head] @ sines(m - n, module.d_model)
        u, v = module.content_bias[head], module.position_bias[head]
        return (q @ k + q @ r + u @ k + v @ r) / math.sqrt(len(q))

    return Loops(score)


def t5_bucket(distance: int, buckets: int, max_distance: int) -> int:
    """§2.1 and the released code: exact, then logarithmic, then all beyond. Float64 and away from what it rounds."""
    exact = buckets // 2
    if distance < exact:
        return distance
    share = math.log(distance / exact) / math.log(max_distance / exact)
    return min(buckets - 1, exact + math.floor(share * (buckets - exact) + 1e-12))


def t5(module: P.T5Positions, buckets: int, max_distance: int, *, scaled: bool = False) -> Loops:
    """Products, unscaled if not said, and a number of the table."""

    def score(h: int, m: int, n: int, q: Tensor, k: Tensor) -> Tensor:
        if module.causal:
            row = t5_bucket(m - n, buckets, max_distance)
        else:
            row = t5_bucket(abs(m - n), buckets // 2, max_distance) + (buckets // 2 if n > m else 0)
        return q @ k * (1 / math.sqrt(len(q)) if scaled else 1) + module.positions.weight[row, h]

    return Loops(score)


def deberta(module: P.DebertaPositions) -> Loops:
    """Eqs. 2–4, with δ(m, n) in both terms, as in the released code."""
    L = module.max_distance

    def score(h: int, m: int, n: int, q: Tensor, k: Tensor) -> Tensor:
        delta = 0 if m - n <= -L else 2 * L - 1 if m - n >= L else m - n + L
        p = module.positions.weight[delta - L if module.causal else delta]
        head = slice(h * len(q), (h + 1) * len(q))
        k_r, q_r = module.key.weight[head] @ p, module.query.weight[head] @ p
        if module.query.bias is not None:
            q_r = q_r + module.query.bias[head]
        return (q @ k + q @ k_r + k @ q_r) / math.sqrt(3 * len(q))

    return Loops(score)


def alibi(slopes: list[float]) -> Loops:
    """§3, with slopes written out by the test."""
    return Loops(lambda h, m, n, q, k: q @ k / math.sqrt(len(q)) - slopes[h] * abs(m - n))


def xpos_weight(xpos: P.XPos, m: int, n: int, q: Tensor, k: Tensor) -> Tensor:
    """Eq. 12: the pairs' products after rotation, each times ζ_i^((m − n)/b)."""
    D = len(q)
    q, k = (torch.tensor(rotation_matrix(at, D, xpos.base)) @ x for at, x in ((m, q), (n, k)))
    zetas = [((2 * i / D) + xpos.gamma) / (1 + xpos.gamma) for i in range(D // 2)]
    fading = torch.tensor([z ** ((m - n) / xpos.decay_base) for z in zetas for _ in range(2)], dtype=torch.float64)
    return (q * k * fading).sum()


def xpos(xpos: P.XPos) -> Loops:
    """Softmax of the faded products."""
    return Loops(lambda h, m, n, q, k: xpos_weight(xpos, m, n, q, k) / math.sqrt(len(q)))


@dataclass
class Case:
    """An encoding: how its module is made, and the loops that it has to equal."""

    make: Callable[[bool], P.ScorePositions]  # causal → module
    loops: Callable[[P.ScorePositions], Loops]


HEADS, SIZE, E = 3, 4, 10
CASES = {
    "shaw": Case(lambda causal: P.ShawPositions(SIZE, max_distance=2, causal=causal), shaw),
    "transformer_xl": Case(lambda causal: P.TransformerXLPositions(E, HEADS, SIZE, causal=causal), transformer_xl),
    "t5": Case(lambda causal: P.T5Positions(HEADS, 8, 6, causal=causal), lambda module: t5(module, 8, 6)),
    "deberta": Case(lambda causal: P.DebertaPositions(E, HEADS, SIZE, 3, causal=causal, bias=not causal), deberta),
    "alibi": Case(lambda causal: P.AlibiPositions(HEADS), lambda module: alibi([1 / 16, 1 / 256, 1 / 4])),
}


def built(name: str, *, causal: bool = True) -> P.ScorePositions:
    """A case's module in float64, with parameters of size 1, so that one left out shows."""
    torch.manual_seed(0)
    module = CASES[name].make(causal).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module
