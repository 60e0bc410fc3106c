"""What every attention module shares: projections to heads and back (Vaswani et al. 2017, arXiv 1706.03762, §3.2.2).

A mechanism is a subclass that mixes values along the sequence. Letters: B batch, N length, E model dim, H heads,
K heads of keys and values, D head dim.
"""

from typing import Any

from torch import Tensor, nn

from lin_attn.positions import Rotary, XPos
from lin_attn.projection import project


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

    def checked_rotation(self, rope: bool, rope_base: float, rotary: Rotary | XPos | None) -> Rotary | XPos | None:
        """The rotation that the arguments of a mechanism ask for.

        Raises:
            ValueError: if they contradict each other, or the rotation is not for this attention.
        """
        if rotary is None:
            return Rotary(self.head_dim, rope_base) if rope else None
        if not isinstance(rotary, Rotary | XPos):
            raise ValueError(f"rotary is a {type(rotary).__name__}; wanted a Rotary, an XPos or None")
        if not rope:
            raise ValueError("rotary is given and rope says that nothing is rotated; wanted one of the two")
        if rope_base != 10000.0:
            raise ValueError(f"rope_base is {rope_base} and rotary is given, which has its own base; leave it out")
        if isinstance(rotary, XPos) and not self.causal:
            raise ValueError("rotary is an XPos and causal is False; xPos grows without bound ahead of a query")
        return rotary

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
        if context is None:
            projected = project(x, self.query, self.key, self.value)
        else:
            projected = [*project(x, self.query), *project(context, self.key, self.value)]
        q, k, v = map(self._heads, projected)
        heads, state = self.mix(q, k, v, key_mask=key_mask, state=state)
        out = self._joined(heads)
        return (out, state) if return_state else out

    def read(self, context: Tensor, key_mask: Tensor | None = None) -> Any:
        """What cross-attention keeps of a context: its keys and values, or for linear attention their sums.

        Args:
            context: (B, N_k, E), another sequence.
            key_mask: (B, N_k) bool, True where the key is real.

        Returns:
            The state that `attend` takes, as often as there are queries.

        Raises:
            ValueError: if the attention is causal or rotates (positions of two sequences have no distance), or a shape
                does not fit.
        """
        if self.causal or getattr(self, "rotary", None) is not None:
            raise ValueError(
                "the attention is causal or rotates keys; wanted causal=False and no rope to read a context"
            )
        if context.dim() != 3 or context.shape[-1] != self.key.in_features:
            raise ValueError(f"context has shape {tuple(context.shape)}; wanted (B, N_k, {self.key.in_features})")
        k, v = map(self._heads, project(context, self.key, self.value))
        none = k.new_empty(k.shape[0], self.n_heads, 0, self.head_dim)
        return self.mix(none, k, v, key_mask=key_mask, state=None)[1]

    def attend(self, x: Tensor, state: Any) -> Tensor:
        """Attends from x (B, N, E) to a context that was `read`: (B, N, E). Equals `forward(x, context=…)`.

        Raises:
            ValueError: if the state is none of this attention's.
        """
        q = self._heads(project(x, self.query)[0])
        none = q.new_empty(q.shape[0], self.n_kv_heads, 0, self.head_dim)
        return self._joined(self.mix(q, none, none, key_mask=None, state=state)[0])

    def _heads(self, x: Tensor) -> Tensor:
        """(B, N, H·D) → (B, H, N, D). By a view, as a step of decoding would wait for anything slower."""
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2)

    def _joined(self, heads: Tensor) -> Tensor:
        """The heads' outputs (B, H, N, D), normalised where that is asked for, side by side and projected."""
        if self.output_norm is not None:
            heads = self.output_norm(heads)
        return project(heads.transpose(1, 2).flatten(2), self.output)[0]

    def mix(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        """q (B, H, N, D), k and v (B, K, N_k, D) → the heads' outputs (B, H, N, D) and the state after them."""
        raise NotImplementedError
