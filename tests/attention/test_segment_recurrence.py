"""Transformer-XL's memory: a segment sees the inputs before it and sends no gradient back into them."""

import pytest
import torch

from lin_attn.attention import SegmentMemory, SegmentRecurrentAttention, SoftmaxAttention
from lin_attn.positions import TransformerXLPositions
from models import CausalLM
from tests.helpers import relative

E, HEADS, SIZE = 12, 4, 3
EXACT = 1e-11  # float64


def build(memory_length: int) -> SegmentRecurrentAttention:
    torch.manual_seed(0)
    positions = TransformerXLPositions(E, HEADS, SIZE, causal=True)
    module = SegmentRecurrentAttention(E, HEADS, 2, positions=positions, memory_length=memory_length).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return module


def whole(module: SegmentRecurrentAttention) -> SoftmaxAttention:
    """The same weights without a memory."""
    plain = SoftmaxAttention(E, HEADS, 2, positions=module.encoding).double()
    plain.load_state_dict(module.state_dict())
    return plain


def some_input(length: int = 12, seed: int = 1) -> torch.Tensor:
    return torch.randn(2, length, E, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_segments(module, x, cuts, key_mask=None):
    state, outs, at = None, [], 0
    for piece in x.split(cuts, dim=1):
        mask = None if key_mask is None else key_mask[:, at : at + piece.shape[1]]
        out, state = module(piece, key_mask=mask, state=state, return_state=True)
        outs.append(out)
        at += piece.shape[1]
    return outs, state


@pytest.mark.parametrize("cuts", [[4, 4, 4], [1] * 12, [5, 0, 7]])
@pytest.mark.parametrize("masked", [True, False])
def test_a_memory_of_all_tokens_gives_what_one_segment_gives(cuts, masked):
    module, x = build(100), some_input()
    mask = torch.arange(12)[None] >= torch.tensor([[3], [0]]) if masked else None
    outs, state = by_segments(module, x, cuts, mask)
    assert relative(torch.cat(outs, dim=1), whole(module)(x, key_mask=mask)) <= EXACT
    assert state.length == 12


def test_a_shorter_memory_is_attention_over_the_last_tokens():
    """Segments of 4 with 3 tokens remembered: each is the end of a sequence of 7."""
    module, x = build(3), some_input()
    outs, state = by_segments(module, x, [4, 4, 4])
    plain = whole(module)
    assert relative(outs[0], plain(x[:, :4])) <= EXACT
    assert relative(outs[1], plain(x[:, 1:8])[:, 3:]) <= EXACT
    assert relative(outs[2], plain(x[:, 5:12])[:, 3:]) <= EXACT
    assert relative(outs[2], plain(x)[:, 8:]) > 1e-3
    assert torch.equal(state.hidden, x[:, 9:])


def test_no_gradient_reaches_earlier_segments_and_the_weights_learn_from_the_memory():
    module, x = build(4), some_input(8).requires_grad_()
    outs, _ = by_segments(module, x, [4, 4])
    [gradient] = torch.autograd.grad(outs[1].square().sum(), x, retain_graph=True)
    assert not gradient[:, :4].any()
    assert gradient[:, 4:].abs().sum() > 0

    # Nor what is remembered beside an older memory.
    outs, _ = by_segments(build(8), x, [2, 2, 4])
    [later] = torch.autograd.grad(outs[2].square().sum(), x)
    assert not later[:, :4].any()

    outs, _ = by_segments(module, x, [4, 4])
    # The paper's W_k of [SG(memory) ∘ h]: by hand, over both parts, with the first one held still.
    together = torch.cat((x[:, :4].detach(), x[:, 4:]), dim=1)
    wanted = torch.autograd.grad(whole(module)(together)[:, 4:].square().sum(), x)[0]
    assert relative(gradient, wanted) <= EXACT
    plain = whole(module)
    plain(together.detach())[:, 4:].square().sum().backward()
    [weight] = torch.autograd.grad(outs[1].square().sum(), module.key.weight)
    # A query of the first segment adds nothing to the loss; its keys do, through the second one.
    assert relative(weight, plain.key.weight.grad) <= EXACT


def test_a_memory_is_not_changed_by_going_on_from_it():
    module, x = build(5), some_input()
    _, state = module(x[:, :6], return_state=True)
    kept = state.hidden.clone()
    first = module(x[:, 6:], state=state)
    module(x[:, :6].flip(1), state=state, return_state=True)
    assert torch.equal(state.hidden, kept)
    assert torch.equal(module(x[:, 6:], state=state), first)


def test_a_network_reads_a_long_text_segment_by_segment():
    """The same as segments given one call at a time; a memory that holds all is the plain network."""
    fields = {"vocab_size": 31, "d_model": 24, "n_layers": 2, "n_heads": 4, "attention": "softmax"}
    fields["position"] = "transformer_xl"
    tokens = torch.randint(31, (2, 20), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    short = CausalLM(network=fields | {"memory_length": 3, "segment_length": 8}).double()
    state, pieces = None, []
    for piece in tokens.split(8, dim=1):
        logits, state = short(piece, state=state, return_state=True)
        pieces.append(logits)
    assert torch.equal(short(tokens), torch.cat(pieces, dim=1))
    assert [layer.length for layer in state.layers] == [3, 3]
    assert state.length == 20
    long, plain = CausalLM(network=fields | {"memory_length": 20, "segment_length": 8}), CausalLM(network=fields)
    for model in (long, plain):
        model.double().load_state_dict(short.state_dict())
    torch.testing.assert_close(long(tokens), plain(tokens), rtol=1e-9, atol=1e-9)
    assert (short(tokens) - plain(tokens)).abs().max() > 1e-3
    greedy = long.generate(tokens, 12, temperature=0)
    assert torch.equal(greedy[:, :23], plain.generate(tokens, 3, temperature=0)[:, :23])
    assert short.generate(tokens, 5, temperature=0).shape == (2, 25)


def test_what_is_wrong_is_named():
    module, x = build(3), some_input()
    with pytest.raises(ValueError, match="memory_length"):
        build(0)
    with pytest.raises(ValueError, match="state"):
        module(x, state=(x, None))
    with pytest.raises(ValueError, match=r"state\.hidden"):
        module(x, state=SegmentMemory(x[:1]))
    with pytest.raises(ValueError, match="context"):
        module(x, context=x)
