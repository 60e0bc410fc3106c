"""The position encoding that a network's configuration names: what rotates queries and keys, what adds to scores."""

from lin_attn.positions import (
    AlibiPositions,
    DebertaPositions,
    RopeScaling,
    Rotary,
    ScorePositions,
    ShawPositions,
    T5Positions,
    TransformerXLPositions,
    XPos,
)
from models.config import NetworkConfig

MAX_DISTANCE = {"shaw": 16, "t5": 128, "deberta": 512}  # of the papers
N_BUCKETS = 32


def rotation(config: NetworkConfig) -> Rotary | XPos | None:
    """The rotation of queries and keys, or of their features; None for positions of another kind.

    Raises:
        ValueError: if the head's size does not suit it.
    """
    head_dim = config.d_model // config.n_heads
    if config.position == "xpos":
        return XPos(head_dim, config.rope_base, config.decay_base)
    if config.position != "rope":
        return None
    scaling = None if config.rope_scaling == "none" else RopeScaling(config.rope_scaling, config.rope_factor)
    return Rotary(head_dim, config.rope_base, config.rotary_dim, scaling)


def score_positions(config: NetworkConfig, *, causal: bool) -> list[ScorePositions | None]:
    """What adds a term to the scores, one a layer; None for positions of another kind.

    T5's layers share one table, as do DeBERTa's, each with projections of its own; Shaw's and Transformer-XL's share
    nothing.
    """
    found: list[ScorePositions | None] = []
    first: ScorePositions | None = None
    for _ in range(config.n_layers):
        found.append(_of_a_layer(config, causal, first))
        first = found[0]
    return found


def _of_a_layer(config: NetworkConfig, causal: bool, first: ScorePositions | None) -> ScorePositions | None:
    """A layer's own, given the first layer's."""
    heads, head_dim = config.n_heads, config.d_model // config.n_heads
    if config.position == "alibi":
        return first or AlibiPositions(heads)
    if config.position == "transformer_xl":
        return TransformerXLPositions(config.d_model, heads, head_dim, causal=causal)
    if config.position not in MAX_DISTANCE:
        return None
    far = config.max_distance or MAX_DISTANCE[config.position]
    if config.position == "t5":
        return first or T5Positions(heads, config.n_buckets or N_BUCKETS, far, causal=causal, scaled=True)
    if config.position == "shaw":
        return ShawPositions(head_dim, max_distance=far, causal=causal)
    table = first.positions if isinstance(first, DebertaPositions) else None
    return DebertaPositions(config.d_model, heads, head_dim, far, causal=causal, bias=config.bias, table=table)
