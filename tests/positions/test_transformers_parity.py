"""T5's and DeBERTa's attention equal those of transformers, and rotary frequencies too, with the same weights."""

import pytest
import torch
import transformers

from lin_attn.attention import SoftmaxAttention
from lin_attn.positions import DebertaPositions, RopeScaling, Rotary, T5Positions
from tests.helpers import relative

PARITY = 1e-5  # float32 on both sides
E, HEADS, SIZE, N = 24, 3, 8, 70


def some_input() -> torch.Tensor:
    return torch.randn(2, N, E, generator=torch.Generator().manual_seed(1))


MASK = torch.arange(N)[None] < torch.tensor([[N], [N - 13]])


@pytest.mark.parametrize("decoder", [True, False])
def test_t5(decoder):
    """Encoder and decoder attention over a padded batch, with distances well beyond the last bucket."""
    from transformers.models.t5.modeling_t5 import T5Attention

    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=E, d_kv=SIZE, num_heads=HEADS, relative_attention_num_buckets=16,
        relative_attention_max_distance=40, dropout_rate=0.0, is_decoder=decoder,
        attn_implementation="eager",
    )  # fmt: skip
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
    positions = T5Positions(HEADS, 16, 40, causal=decoder)
    ours = SoftmaxAttention(E, HEADS, positions=positions, causal=decoder)
    with torch.no_grad():
        theirs.relative_attention_bias.weight.normal_()
        positions.positions.weight.copy_(theirs.relative_attention_bias.weight)
        for mine, name in ((ours.query, "q"), (ours.key, "k"), (ours.value, "v"), (ours.output, "o")):
            mine.weight.copy_(getattr(theirs, name).weight)
        x = some_input()
        allowed = MASK[:, None, None, :].expand(2, 1, N, N)
        allowed = allowed.tril() if decoder else allowed
        added = torch.zeros(2, 1, N, N).masked_fill(~allowed, torch.finfo(torch.float32).min)
        bias = theirs.compute_bias(N, N) + added
        wanted = theirs(x, mask=None, position_bias=bias)[0]
        got = ours(x, key_mask=MASK)
    assert relative(got[MASK], wanted[MASK]) <= PARITY


@pytest.mark.parametrize(("causal", "buckets", "far"), [(True, 32, 128), (False, 32, 128), (False, 64, 1000)])
def test_t5_buckets_of_every_distance(causal, buckets, far):
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = torch.arange(-1500, 1501)
    wanted = T5Attention._relative_position_bucket(
        -distances, bidirectional=not causal, num_buckets=buckets, max_distance=far
    )
    assert torch.equal(T5Positions(1, buckets, far, causal=causal).buckets(distances), wanted)


@pytest.mark.parametrize("max_distance", [16, 512])
def test_deberta(max_distance):
    """Content to content, to position and from position, with and without clipped distances."""
    from transformers.models.deberta.modeling_deberta import DisentangledSelfAttention, build_relative_position

    torch.manual_seed(0)
    config = transformers.DebertaConfig(
        hidden_size=E, num_attention_heads=HEADS, relative_attention=True, pos_att_type=["c2p", "p2c"],
        max_relative_positions=max_distance, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    theirs = DisentangledSelfAttention(config).eval()
    positions = DebertaPositions(E, HEADS, SIZE, max_distance, causal=False, bias=True)
    ours = SoftmaxAttention(E, HEADS, positions=positions, causal=False, bias=True)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
        positions.positions.weight.normal_()
        # Theirs keeps the rows of a head's q, k and v together.
        q, k, v = theirs.in_proj.weight.view(HEADS, 3, SIZE, E).unbind(1)
        for mine, weight in ((ours.query, q), (ours.key, k), (ours.value, v)):
            mine.weight.copy_(weight.reshape(HEADS * SIZE, E))
        ours.query.bias.copy_(theirs.q_bias)
        ours.key.bias.zero_()
        ours.value.bias.copy_(theirs.v_bias)
        positions.key.weight.copy_(theirs.pos_proj.weight)
        positions.query.load_state_dict(theirs.pos_q_proj.state_dict())
        ours.output.weight.copy_(torch.eye(E))
        ours.output.bias.zero_()
        x = some_input()
        wanted = theirs(
            x,
            MASK[:, None, None, :].expand(2, 1, N, N),
            relative_pos=build_relative_position(x, x),
            rel_embeddings=positions.positions.weight,
        )[0]
        got = ours(x, key_mask=MASK)
    assert relative(got[MASK], wanted[MASK]) <= PARITY


@pytest.mark.parametrize(("kind", "share"), [("linear", 1.0), ("linear", 0.5), ("dynamic", 1.0)])
def test_rotary_frequencies(kind, share):
    """Scaled and partial. Their "dynamic" is NTK scaling by the length at hand; ours is fixed, at length / original."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    D, factor, original = 16, 4.0, 128
    parameters = {"rope_type": kind, "rope_theta": 500.0, "factor": factor, "partial_rotary_factor": share}
    if kind == "dynamic":
        parameters |= {"factor": 1.0, "original_max_position_embeddings": original}
    config = transformers.LlamaConfig(
        hidden_size=2 * D, num_attention_heads=2, head_dim=D, max_position_embeddings=original,
        rope_parameters=parameters,
    )  # fmt: skip
    wanted, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=int(original * factor))
    scaling = RopeScaling.between("ntk" if kind == "dynamic" else "linear", original, int(original * factor))
    rotary = Rotary(D, 500.0, int(D * share), scaling)
    got = rotary.frequencies()
    torch.testing.assert_close(got[: len(wanted)].float(), wanted, rtol=1e-6, atol=0)
    assert not got[len(wanted) :].any()
    assert len(wanted) == rotary.rotated // 2
