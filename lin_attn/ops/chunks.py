"""The inputs of linear attention cut into chunks, their features made on the way, for ops that scan a sequence.

Letters: B batch, K heads of k and v, G = H/K queries' heads for each, P = B·K, C chunk, D, M head dims. As in
`linear_chunked`, k̃ are rotated features and k̂ plain ones.
"""

import torch
from torch import Tensor

from lin_attn.feature_maps import feature_map
from lin_attn.ops.linear_reference import Rotation, features
from lin_attn.positions import rotate


class ChunkedInputs:
    """Features of a chunk at a time, and their vector-Jacobian products, in float32 at least."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        phi: str,
        rope: str,
    ) -> None:
        self.q, self.k, self.v = q.unflatten(1, (k.shape[1], -1)), k, v
        self.hidden = None if key_mask is None else ~key_mask[:, None, :, None]
        self.cos, self.sin, self.phi, self.rope = cos, sin, feature_map(phi), rope
        self.wide = torch.promote_types(q.dtype, torch.float32)
        # The scores of a chunk cost 2·C·(D + M) operations a token, the sums 4·D·M: C grows with the heads, between the
        # overhead of products too small and the waste of masked scores.
        self.chunk = 64 if k.shape[3] + v.shape[3] <= 64 else 128

    def chunks(self, length: int) -> list[slice]:
        """0 … length − 1 in pieces of C, the last one shorter."""
        return [slice(start, min(start + self.chunk, length)) for start in range(0, length, self.chunk)]

    def queries(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """q̃ and q̂, (P, G, C, D)."""
        return self._features(self.q[:, :, :, chunk], chunk)

    def keys(self, chunk: slice) -> tuple[Tensor, Tensor, Tensor]:
        """k̃ and k̂ (P, C, D) and v (P, C, M), zero where hidden."""
        num, den = self._features(self.k[:, :, chunk], chunk)
        v = self.v[:, :, chunk].to(self.wide)
        return self._visible(num, chunk), self._visible(den, chunk), self._visible(v.flatten(0, 1), chunk)

    def queries_vjp(self, chunk: slice, grad_num: Tensor, grad_den: Tensor | None) -> Tensor:
        """∂q of a chunk, (P, G, C, D)."""
        return self._features_vjp(self.q[:, :, :, chunk], chunk, grad_num, grad_den)

    def keys_vjp(self, chunk: slice, grad_num: Tensor, grad_den: Tensor | None) -> Tensor:
        """∂k of a chunk, (P, C, D), zero where hidden."""
        return self._visible(self._features_vjp(self.k[:, :, chunk], chunk, grad_num, grad_den), chunk)

    def _features(self, x: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        return features(x.to(self.wide).flatten(0, 1), self.phi, self._rotation(chunk), self.rope)

    def _features_vjp(self, x: Tensor, chunk: slice, grad_num: Tensor, grad_den: Tensor | None) -> Tensor:
        x, rotation = x.to(self.wide).flatten(0, 1), self._rotation(chunk)
        if rotation is not None and self.rope == "after":  # R is orthogonal: its transpose turns back
            grad_num = rotate(grad_num, rotation[0], -rotation[1])
        grad = grad_num if grad_den is None else grad_num + grad_den
        if rotation is not None and self.rope == "before":
            return rotate(self.phi.vjp(rotate(x, *rotation), grad), rotation[0], -rotation[1])
        return self.phi.vjp(x, grad)

    def _rotation(self, chunk: slice) -> Rotation:
        return None if self.cos is None or self.sin is None else (self.cos[chunk], self.sin[chunk])

    def _visible(self, x: Tensor, chunk: slice) -> Tensor:
        """x (P, C, …) with hidden keys taken out: *after* the feature map, since φ(0) = 1."""
        if self.hidden is None:
            return x
        hidden = self.hidden[:, :, chunk].expand(-1, self.k.shape[1], -1, -1)
        return x.masked_fill(hidden.flatten(0, 1), 0)
