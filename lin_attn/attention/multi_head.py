"""What every attention module shares: projections to heads and back (Vaswani et al. 2017, arXiv 1706.03762, §3.2.2).

A mechanism is a subclass that mixes values along the sequence. Letters: B batch, N length, E model dim, H heads,
K heads of keys and values, D head dim.
"""

from typing import Any

from einops import rearrange
from torch import Tensor, nn


class MultiHeadAttention(nn.Module):
    """Projects x to queries, keys and values, mixes them per head, and projects back.

    Args:
        d_model: E, the size of x's last axis.
        n_heads: H.
        n_kv_heads: K, a divisor of H; H by default. Each key and value head serves H/K query heads.
        head_dim: D, E/H by default.
        causal: token m sees the tokens n ≤ m; otherwise all of them.
        output_norm: RMSNorm of each head's output (Sun et al. 2023, arXiv 2307.08621, norm a head; the learned scale is
            shared by the heads).
        bias: of the projections.

    Raises:
        ValueError: if the sizes do not divide.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        causal: bool = True,
        output_norm: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        for name, value in (("d_model", d_model), ("n_heads", n_heads), ("n_kv_heads", n_kv_heads)):
            if value < 1:
                raise ValueError(f"{name} is {value}; wanted at least 1")
        if head_dim is None:
            if d_model % n_heads:
                raise ValueError(f"d_model is {d_model}; wanted a multiple of n_heads, {n_heads}, or a head_dim")
            head_dim = d_model // n_heads
        if n_heads % n_kv_heads:
            raise ValueError(f"n_kv_heads is {n_kv_heads}; wanted a divisor of n_heads, {n_heads}")
        self.n_heads, self.n_kv_heads, self.head_dim, self.causal = n_heads, n_kv_heads, head_dim, causal
        self.query = nn.Linear(d_model, n_heads * head_dim, bias=bias)
        self.key = nn.Linear(d_model, n_kv_heads * head_dim, bias=bias)
        self.value = nn.Linear(d_model, n_kv_heads * head_dim, bias=bias)
        self.output = nn.Linear(n_heads * head_dim, d_model, bias=bias)
        self.output_norm = nn.RMSNorm(head_dim, eps=1e-6) if output_norm else None

    def forward(
        self,
        x: Tensor,
        *,
        context: Tensor | None = None,
        key_mask: Tensor | None = None,
        state: Any = None,
        return_state: bool = False,
    ) -> Any:
        """Attends from x to itself, or to a context.

        Args:
            x: (B, N, E).
            context: (B, N_k, E) to take keys and values from, if not x; only where not causal.
            key_mask: (B, N_k) bool, True where the key is real.
            state: what an earlier call returned for the tokens before x.
            return_state: return the state after x as well.

        Returns:
            (B, N, E), or that and the state: a LinearState or KVCache, by mechanism.

        Raises:
            ValueError: for a context with causal attention or with a state, or a shape that does not fit.
        """
        if context is not None and self.causal:
            raise ValueError("context is given and causal is True; wanted causal=False to attend to another sequence")
        if context is not None and (state is not None or return_state):
            raise ValueError("context and state are given; wanted one: the state is for the tokens before x itself")
        for name, tensor in (("x", x), ("context", context)):
            if tensor is not None and (tensor.dim() != 3 or tensor.shape[-1] != self.query.in_features):
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; wanted (B, N, {self.query.in_features})")
        source = x if context is None else context
        q = rearrange(self.query(x), "b n (h d) -> b h n d", h=self.n_heads)
        k = rearrange(self.key(source), "b n (h d) -> b h n d", h=self.n_kv_heads)
        v = rearrange(self.value(source), "b n (h d) -> b h n d", h=self.n_kv_heads)
        heads, state = self.mix(q, k, v, key_mask=key_mask, state=state)
        if self.output_norm is not None:
            heads = self.output_norm(heads)
        out = self.output(rearrange(heads, "b h n d -> b n (h d)"))
        return (out, state) if return_state else out

    def mix(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        """q (B, H, N, D), k and v (B, K, N_k, D) → the heads' outputs (B, H, N, D) and the state after them."""
        raise NotImplementedError
