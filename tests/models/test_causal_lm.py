"""Whole models keep the properties of their attention: causal, prefix- and split-invariant, padding-invariant."""

import pytest
import torch
import torch.nn.functional as F

from lin_attn import Rotary, linear_attention, softmax_attention
from lin_attn.data import ByteTokenizer
from lin_attn.ops import xpos_linear_attention
from lin_attn.positions import RopeScaling, XPos
from models import CausalLM, NetworkConfig
from models.optimization import split_by_decay
from tests.positions import oracles

VOCAB = 31
SIZES = {"vocab_size": VOCAB, "d_model": 24, "n_layers": 2, "n_heads": 4}
NETWORKS = {
    "linear rope after": {},
    "linear rope before": {"rope": "before"},
    "linear none": {"position": "none"},
    "linear sinusoidal": {"position": "sinusoidal"},
    "linear learned": {"position": "learned", "max_length": 64},
    "linear bare": {"normalize": False, "output_norm": True, "feature_map": "exp"},
    "linear grouped": {"n_kv_heads": 2, "ffn": "swiglu", "norm": "rms", "tie_embeddings": False},
    "linear post-norm": {"norm_position": "post", "bias": True, "ffn": "relu", "norm_eps": 0.1},
    "linear roformer": {
        "norm_position": "post",
        "bias": True,
        "embedding_norm": True,
        "embedding_size": 8,
        "head": "bert",
    },
    "softmax rope": {"attention": "softmax"},
    "softmax sinusoidal": {"attention": "softmax", "position": "sinusoidal"},
    "linear rope partial": {"rotary_dim": 2, "rope_base": 500.0},
    "linear xpos": {"position": "xpos", "decay_base": 4.0},
    "softmax rope scaled": {"attention": "softmax", "rope_scaling": "ntk", "rope_factor": 2.0},
    "softmax xpos": {"attention": "softmax", "position": "xpos", "decay_base": 4.0},
    "softmax shaw": {"attention": "softmax", "position": "shaw", "max_distance": 4},
    "softmax transformer_xl": {"attention": "softmax", "position": "transformer_xl"},
    "softmax t5": {"attention": "softmax", "position": "t5", "max_distance": 12, "n_buckets": 8, "n_kv_heads": 2},
    "softmax deberta": {"attention": "softmax", "position": "deberta", "max_distance": 8},
    "softmax alibi": {"attention": "softmax", "position": "alibi"},
    "softmax grouped": {"attention": "softmax", "n_kv_heads": 1, "output_norm": True, "norm": "rms"},
}
LOOPS = {
    "xpos": lambda module, config: oracles.xpos(XPos(config.d_model // config.n_heads, decay_base=config.decay_base)),
    "shaw": lambda module, config: oracles.shaw(module),
    "transformer_xl": lambda module, config: oracles.transformer_xl(module),
    "t5": lambda module, config: oracles.t5(module, config.n_buckets, config.max_distance, scaled=True),
    "deberta": lambda module, config: oracles.deberta(module),
    "alibi": lambda module, config: oracles.alibi([1 / 4, 1 / 16, 1 / 64, 1 / 256]),
}
# Float64, so that what is equal in exact arithmetic is equal to rounding, whatever the order of sums.
EQUAL = {"rtol": 1e-9, "atol": 1e-9}


@pytest.fixture(params=NETWORKS, ids=lambda name: name.replace(" ", "-"))
def model(request):
    torch.manual_seed(0)
    return CausalLM(network=SIZES | NETWORKS[request.param]).double().eval()


@pytest.fixture
def tokens():
    return torch.randint(VOCAB, (3, 20), generator=torch.Generator().manual_seed(1))


def by_hand(model, tokens):
    """Logits from the model's own weights, each step written out from what the configuration says."""
    config, net = model.network_config, model.network
    D = config.d_model // config.n_heads

    def norm(x, module):
        if config.norm == "rms":
            return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.weight
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + (config.norm_eps or 1e-5)).sqrt() * module.weight + module.bias

    def project(x, module):
        return x @ module.weight.T + (module.bias if config.bias else 0)

    def heads(x, projection):
        return project(x, projection).unflatten(-1, (-1, D)).transpose(1, 2)

    def mix(q, k, v, module):
        scaling = None if config.rope_scaling == "none" else RopeScaling(config.rope_scaling, config.rope_factor)
        rotary = Rotary(D, config.rope_base, config.rotary_dim, scaling) if config.position == "rope" else None
        if config.position == "xpos" and config.attention == "linear":
            return xpos_linear_attention(q, k, v, xpos=XPos(D, decay_base=config.decay_base), backend="reference")
        if config.position in LOOPS:
            return LOOPS[config.position](module.encoding, config)(q, k, v)
        if config.attention == "softmax":
            return softmax_attention(q, k, v, rotary=rotary)
        options = {"feature_map": config.feature_map, "normalize": config.normalize, "rope": config.rope}
        return linear_attention(q, k, v, rotary=rotary, backend="reference", **options)

    def attend(x, module):
        out = mix(*(heads(x, projection) for projection in (module.query, module.key, module.value)), module)
        if config.output_norm:
            out = out / (out.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.output_norm.weight
        return project(out.transpose(1, 2).flatten(2), module.output)

    def feed_forward(x, module):
        inner = project(x, module.inner)
        if config.ffn == "swiglu":
            return project(F.silu(project(x, module.gate)) * inner, module.output)
        return project(F.gelu(inner) if config.ffn == "gelu" else inner.relu(), module.output)

    x = net.embedding.weight[tokens]
    if config.position == "learned":
        x = x + net.learned_positions.table.weight[: tokens.shape[1]]
    if config.position == "sinusoidal":
        angles = torch.arange(tokens.shape[1])[:, None] * 10000.0 ** -(
            torch.arange(0, config.d_model, 2) / config.d_model
        )
        x = x * config.d_model**0.5 + torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1).double()
    if config.embedding_norm:
        x = norm(x, net.embedding_norm)
    if config.embedding_size is not None:
        x = project(x, net.projection)
    for block in net.blocks:
        if config.norm_position == "post":
            x = norm(x + attend(x, block.attention), block.attention_norm)
            x = norm(x + feed_forward(x, block.feed_forward), block.feed_forward_norm)
            continue
        x = x + attend(norm(x, block.attention_norm), block.attention)
        x = x + feed_forward(norm(x, block.feed_forward_norm), block.feed_forward)
    head = net.embedding.weight if config.tie_embeddings else net.head.weight
    x = norm(x, net.norm) if config.norm_position == "pre" else x
    if config.head == "bert":
        x = norm(F.gelu(x @ net.transform.dense.weight.T + net.transform.dense.bias), net.transform.norm)
        return x @ head.T + net.head.bias
    return x @ head.T


def test_the_network_is_what_its_configuration_says(model, tokens):
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if model.network_config.position == "sinusoidal" else EQUAL
    with torch.no_grad():  # scales of one and biases of zero would hide one that is not applied
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.uniform_(0.5, 1.5)
    torch.testing.assert_close(model(tokens), by_hand(model, tokens), **tolerance)


def test_sizes_of_the_network_are_those_of_its_configuration():
    network = CausalLM(network=SIZES | {"d_ff": 40, "n_kv_heads": 2, "n_layers": 3, "ffn": "swiglu"}).network
    assert len(network.blocks) == 3
    assert network.blocks[0].feed_forward.gate.weight.shape == (40, 24)
    assert network.blocks[0].attention.key.weight.shape == (12, 24)
    assert network.head.weight is network.embedding.weight


@pytest.mark.parametrize("grad", [True, False])
def test_an_exported_model_serves_any_length(grad):
    model = CausalLM(network={"d_model": 32, "n_layers": 1, "n_heads": 2}).eval()
    tokens = torch.randint(256, (1, 300))
    with torch.set_grad_enabled(grad):
        length = torch.export.Dim("length", min=2, max=4096)
        program = torch.export.export(model, (tokens[:, :100],), dynamic_shapes={"tokens": {1: length}})
        for cut in (2, 300):
            got = program.module()(tokens[:, :cut])
            assert torch.allclose(got, model(tokens[:, :cut]), atol=1e-5)


def test_dropout_follows_the_embedding_and_each_branch(tokens):
    model = CausalLM(network=SIZES | {"dropout": 0.3})
    calls = []
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda module, *_: calls.append(module.p))
    model(tokens)
    assert calls == [0.3] * (1 + 2 * SIZES["n_layers"])


def test_dropout_drops_in_training_only(tokens):
    model = CausalLM(network=SIZES | {"dropout": 0.3})
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_no_logit_depends_on_a_later_token(model, tokens):
    changed = tokens.clone()
    changed[:, 11:] = (tokens[:, 11:] + 1) % VOCAB
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :11], after[:, :11])
    assert not torch.allclose(before[:, 11:], after[:, 11:])


@pytest.mark.parametrize("cuts", [[1] * 20, [7, 13], [19, 1], [5, 0, 15]])
def test_pieces_with_the_state_carried_equal_the_whole(model, tokens, cuts):
    state, pieces = None, []
    for piece in tokens.split(cuts, dim=1):
        logits, state = model(piece, state=state, return_state=True)
        pieces.append(logits)
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens), **EQUAL)
    assert state.length == 20


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_real_logit_and_no_gradient(model, tokens, side):
    if side == "left" and model.network_config.rope == "before":
        pytest.skip("φ(R_m q)ᵀ φ(R_n k) depends on m and n themselves: moving a sequence changes it")
    real = [20, 13, 1]
    padded = torch.full((3, 24), VOCAB - 1)
    mask = torch.zeros(3, 24, dtype=torch.bool)
    for row, n in enumerate(real):
        place = slice(24 - n, 24) if side == "left" else slice(0, n)
        padded[row, place], mask[row, place] = tokens[row, :n], True

    def gradients(loss):
        return torch.autograd.grad(loss, list(model.parameters()))

    together = model(padded, key_mask=mask)
    alone = [model(tokens[row : row + 1, :n])[0] for row, n in enumerate(real)]
    torch.testing.assert_close(together[mask], torch.cat(alone), **EQUAL)
    for got, wanted in zip(
        gradients(together[mask].square().sum()), gradients(torch.cat(alone).square().sum()), strict=True
    ):
        torch.testing.assert_close(got, wanted, **EQUAL)


def test_greedy_generation_with_the_state_equals_that_without(model, tokens):
    generated = model.generate(tokens, 12, temperature=0)
    expected = tokens
    for _ in range(12):
        expected = torch.cat([expected, model(expected)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generated, expected)


def test_left_padded_prompts_continue_as_each_alone(model, tokens):
    lengths = [20, 9, 2]
    padded = torch.zeros(3, 20, dtype=torch.int64)
    mask = torch.zeros(3, 20, dtype=torch.bool)
    for row, n in enumerate(lengths):
        padded[row, 20 - n :], mask[row, 20 - n :] = tokens[row, :n], True
    if model.network_config.rope == "before":
        with pytest.raises(ValueError, match="rope"):
            model.generate(padded, 10, key_mask=mask)
        return
    together = model.generate(padded, 10, key_mask=mask, temperature=0)[:, 20:]
    for row, n in enumerate(lengths):
        alone = model.generate(tokens[row : row + 1, :n], 10, temperature=0)[:, n:]
        assert torch.equal(together[row : row + 1], alone)


def test_state_size_is_constant_for_linear_and_grows_for_softmax(model, tokens):
    (_, short), (_, long) = (model(tokens[:, :n], return_state=True) for n in (5, 20))
    if model.network_config.attention == "linear":
        assert short.nbytes == long.nbytes
    else:
        assert 4 * short.nbytes == long.nbytes


def test_a_state_is_not_changed_by_going_on_from_it(model, tokens):
    _, state = model(tokens[:, :10], return_state=True)
    first = model(tokens[:, 10:], state=state)
    model(tokens[:, :10].flip(1), state=state)
    assert torch.equal(model(tokens[:, 10:], state=state), first)


def test_generation_is_repeated_by_its_seed_and_leaves_the_mode_alone(tokens):
    model = CausalLM(network=SIZES | {"dropout": 0.5})
    model.train()
    draws = [model.generate(tokens, 15, temperature=1.5, top_k=10, top_p=0.9, seed=seed) for seed in (3, 3, 4)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert model.training


def test_top_k_and_top_p_reach_the_draw(tokens):
    model = CausalLM(network=SIZES).eval()
    greedy = model.generate(tokens, 10, temperature=0)
    assert torch.equal(model.generate(tokens, 10, top_k=1, seed=0), greedy)
    assert torch.equal(model.generate(tokens, 10, top_p=1e-6, seed=0), greedy)
    assert not torch.equal(model.generate(tokens, 10, seed=0), greedy)


def test_a_token_that_the_tokenizer_has_not_is_never_drawn(tokens):
    model = CausalLM(network=SIZES | {"vocab_size": 400}).eval()
    model.tokenizer = ByteTokenizer()
    assert model.generate(tokens, 300, temperature=5.0, seed=0).max() < 257


def test_a_row_that_stopped_repeats_the_stop_token_and_all_stopped_ends(tokens):
    model = CausalLM(network=SIZES).eval()
    free = model.generate(tokens, 30, temperature=0)[:, 20:]
    stop = int(free[0, 3])
    stopped = model.generate(tokens, 30, temperature=0, stop_token=stop)[:, 20:]
    ends = []
    for row in range(3):
        places = (free[row] == stop).nonzero()
        end = int(places[0]) if len(places) else 30
        ends.append(end)
        end = min(end, stopped.shape[1])
        assert torch.equal(stopped[row, :end], free[row, :end])
        assert (stopped[row, end:] == stop).all()
    assert stopped.shape[1] == min(30, max(ends) + 1)


def test_learned_positions_say_where_they_end(tokens):
    model = CausalLM(network=SIZES | {"position": "learned", "max_length": 24})
    _, state = model(tokens, return_state=True)
    with pytest.raises(ValueError, match="max_length"):
        model(tokens[:, :5], state=state)


@pytest.mark.parametrize("name", ["linear rope after", "softmax rope"])
@pytest.mark.parametrize("length", [16, 40])
def test_compiled_network_gives_the_same_logits(name, length):
    torch.manual_seed(0)
    model = CausalLM(network=SIZES | NETWORKS[name]).eval()
    tokens = torch.randint(VOCAB, (2, length))
    compiled = torch.compile(model.network, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens)[0], model.network(tokens)[0])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"d_modle": 3}, "d_modle"),
        ({"attention": "performer"}, "attention"),
        ({"position": "rotary"}, "position"),
        ({"n_layers": 0}, "n_layers"),
        ({"head": "none"}, "head"),
        ({"embedding_size": 8}, "embedding_size"),
        ({"dropout": 1.0}, "dropout"),
        ({"d_model": 25}, "d_model"),
        ({"n_kv_heads": 3}, "n_kv_heads"),
        ({"attention": "softmax", "rope": "before"}, "rope"),
        ({"attention": "softmax", "feature_map": "relu"}, "feature_map"),
        ({"attention": "softmax", "normalize": False}, "normalize"),
        ({"position": "none", "rope": "before"}, "rope"),
        ({"position": "learned"}, "max_length"),
        ({"max_length": 10}, "max_length"),
        ({"d_model": "24"}, "network"),
        ({"rotary_dim": 5}, "rotary_dim"),
        ({"rope_base": 0.0}, "rope_base"),
        ({"rope_scaling": "linear"}, "rope_factor"),
        ({"rope_factor": 2.0}, "rope_factor"),
        ({"rope_scaling": "dynamic", "rope_factor": 2.0}, "rope_scaling"),
        ({"position": "none", "rope_base": 100.0}, "rope_base"),
        ({"decay_base": 4.0}, "decay_base"),
        ({"position": "xpos", "rope": "before"}, "rope"),
        ({"max_distance": 4}, "max_distance"),
        ({"attention": "softmax", "position": "shaw", "n_buckets": 4}, "n_buckets"),
        ({"attention": "softmax", "position": "transformer_xl", "memory_length": 4}, "segment_length"),
        ({"attention": "softmax", "position": "t5", "memory_length": 4, "segment_length": 4}, "memory_length"),
    ],
)
def test_a_wrong_or_idle_field_is_refused_by_name(fields, named):
    with pytest.raises(ValueError, match=named):
        CausalLM(network=SIZES | fields)


@pytest.mark.parametrize("position", ["shaw", "transformer_xl", "t5", "deberta", "alibi"])
def test_linear_attention_refuses_terms_of_the_scores_and_says_what_is_possible(position):
    with pytest.raises(ValueError, match=r"never forms; wanted one of rope, xpos, sinusoidal, learned, none"):
        CausalLM(network=SIZES | {"position": position})


def test_layers_share_what_their_papers_share():
    def positions(name):
        blocks = CausalLM(network=SIZES | {"attention": "softmax", "position": name}).network.blocks
        return [block.attention.encoding for block in blocks]

    first, second = positions("t5")
    assert first is second
    first, second = positions("deberta")
    assert first.positions is second.positions
    assert first.key.weight is not second.key.weight
    for name in ("shaw", "transformer_xl"):
        first, second = positions(name)
        assert all(a is not b for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_weight_decay_is_for_the_projections_of_positions_and_not_for_their_tables():
    decayed = {"transformer_xl": {"projection.weight"}, "deberta": {"key.weight", "query.weight"}}
    for name in ("shaw", "transformer_xl", "t5", "deberta"):
        model = CausalLM(network=SIZES | {"attention": "softmax", "position": name})
        shrinking = {id(parameter) for parameter in split_by_decay(model)[0]}
        encoding = model.network.blocks[0].attention.encoding
        found = {path for path, parameter in encoding.named_parameters() if id(parameter) in shrinking}
        assert found == decayed.get(name, set())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"temperature": 0, "top_k": 5}, "top_k"),
        ({"key_mask": torch.tensor([[True, False]])}, "key_mask"),
    ],
)
def test_a_wrong_option_of_generation_is_refused_by_name(options, named):
    with pytest.raises(ValueError, match=named):
        CausalLM(network=SIZES).generate(torch.zeros(1, 2, dtype=torch.int64), 3, **options)


def test_residual_branches_start_smaller_the_deeper_the_model():
    torch.manual_seed(0)
    shallow, deep = (CausalLM(network=SIZES | {"d_model": 128, "n_layers": n}).network for n in (2, 8))
    ratio = shallow.blocks[0].attention.output.weight.std() / deep.blocks[0].attention.output.weight.std()
    assert ratio.item() == pytest.approx(2.0, rel=0.05)  # √(8/2)


def test_config_is_the_same_as_an_object_or_a_dict():
    torch.manual_seed(0)
    by_dict = CausalLM(network=SIZES)
    torch.manual_seed(0)
    by_object = CausalLM(network=NetworkConfig(**SIZES))
    assert by_dict.hparams == by_object.hparams
    assert torch.equal(by_dict.network.head.weight, by_object.network.head.weight)
