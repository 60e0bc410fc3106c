"""What position encodings have in common that add a term to the scores of softmax attention.

    score_mn = scale · q_mᵀ k_n + term_mn

Linear attention never forms the scores, so that there is no place for such a term in it.

Letters: B batch, H heads of q, K heads of k, N queries at positions P … P + N − 1, J keys at 0 … J − 1, D head dim.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad


class ScorePositions(nn.Module):
    """A position encoding as a term of the scores; it may have a part in the values as well.

    Attributes:
        causal: True if it knows the distances m − n ≥ 0 only, False if both signs; None if it is the same for both.
        in_values: whether `values` adds to the output, for which all weights have to stand in memory.
    """

    causal: bool | None = None
    in_values = False

    def scale(self, head_dim: int) -> float:
        """The factor of q_mᵀ k_n."""
        return float(head_dim**-0.5)

    def scores(self, q: Tensor, k: Tensor, past: int) -> Tensor:
        """What is added to the scaled scores.

        Args:
            q: (B, H, N, D), queries at the positions past … past + N − 1.
            k: (B, K, J, D), all keys, at the positions 0 … J − 1.
            past: P, the position of the first query.

        Returns:
            A tensor that broadcasts to (B, H, N, J), in q's dtype. Where causal, what it holds at n > m means nothing.
        """
        raise NotImplementedError

    def values(self, weights: Tensor, past: int) -> Tensor:
        """What is added to the output (B, H, N, M), made of the weights (B, H, N, J)."""
        raise NotImplementedError


def distances(queries: int, keys: int, past: int, device: torch.device) -> Tensor:
    """m − n for all queries and keys, (N, J) int64."""
    m = torch.arange(past, past + queries, device=device)
    return m[:, None] - torch.arange(keys, device=device)


def span(queries: int, keys: int, past: int, device: torch.device) -> Tensor:
    """All distances m − n there are, from the greatest to the least, (N + J − 1,) int64."""
    return torch.arange(past + queries - 1, past - keys, -1, device=device)


def toeplitz(by_distance: Tensor, queries: int) -> Tensor:
    """What depends on the distance alone, (…, N + J − 1) in the order of `span`, as a matrix (…, N, J)."""
    keys = by_distance.shape[-1] - queries + 1
    return by_distance.unfold(-1, keys, 1).flip(-2)


def relative_shift(x: Tensor, keys: int) -> Tensor:
    """Moves row m of x by its position, so that columns that are distances become keys (Dai et al. 2019, appendix B).

    Args:
        x: (…, N, W), whose last columns are for the distances down to P − J + 1 (W = N + J − 1: all of `span`), or down
            to 0 (W = J: those that causal attention sees).
        keys: J.

    Returns:
        (…, N, J), with x's value for m − n at [m, n]. With W = J what it holds at n > m means nothing.
    """
    queries, width = x.shape[-2:]
    flat: Tensor = pad(x, (1, 0)).flatten(-2)[..., queries:]
    shifted: Tensor = flat.unflatten(-1, (queries, width))
    return shifted[..., :keys]
