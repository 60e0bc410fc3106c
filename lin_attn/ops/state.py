"""What an attention remembers of the tokens it has seen, to go on from there.

Both kinds are tuples: immutable, so that a state can be kept, branched and differentiated through, and known to
torch.compile and torch.export without registration.
"""

from typing import NamedTuple

from torch import Tensor


class LinearState(NamedTuple):
    """The running sums of linear attention; their size does not depend on how many tokens went in.

    Attributes:
        kv: S = Σ_n (R_n φ(k_n)) v_nᵀ, (B, H_k, D, M), float32 (float64 for float64 inputs).
        k_sum: z = Σ_n φ(k_n), (B, H_k, D), dtype as kv.
        length: number of positions consumed, padding included; the next token's position.
    """

    kv: Tensor
    k_sum: Tensor
    length: int

    @property
    def nbytes(self) -> int:
        """Bytes that the state holds."""
        return self.kv.nbytes + self.k_sum.nbytes


class KVCache(NamedTuple):
    """The keys and values of softmax attention; grows by one entry a token.

    Attributes:
        k: rotated keys, (B, H_k, N, D), in the inputs' dtype.
        v: values, (B, H_k, N, M).
        length: N, the number of positions consumed, padding included; the next token's position.
        key_mask: (B, N) bool, True where the key is real; None if all are.
    """

    k: Tensor
    v: Tensor
    length: int
    key_mask: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that the cache holds."""
        return self.k.nbytes + self.v.nbytes + (0 if self.key_mask is None else self.key_mask.nbytes)
