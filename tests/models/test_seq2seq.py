"""An encoder-decoder decodes on its state what it would without one, and padding, on either side of it, is nothing."""

import pytest
import torch

from lin_attn.data import ByteTokenizer
from models import Seq2Seq
from models.beam_search import beam_search, greedy_search

VOCAB, BEGIN, END = 13, 0, 1
SIZES = {"vocab_size": VOCAB, "d_model": 24, "n_layers": 2, "n_heads": 4}
NETWORKS = {
    "linear rope": {},
    "linear rope before": {"rope": "before"},
    "linear sinusoidal": {"position": "sinusoidal", "norm_position": "post", "bias": True, "ffn": "relu"},
    "linear bare": {"normalize": False, "output_norm": True, "norm": "rms"},
    "linear learned": {"position": "learned", "max_length": 40, "source_vocab_size": 17, "tie_embeddings": False},
    "softmax rope": {"attention": "softmax", "norm_position": "post", "bias": True, "n_decoder_layers": 3},
    "softmax sinusoidal": {"attention": "softmax", "position": "sinusoidal"},
    "softmax t5": {"attention": "softmax", "position": "t5", "max_distance": 12, "n_buckets": 8, "n_kv_heads": 2},
    "softmax shaw": {"attention": "softmax", "position": "shaw", "max_distance": 4},
    "softmax deberta": {"attention": "softmax", "position": "deberta", "max_distance": 8},
}
EQUAL = {"rtol": 1e-9, "atol": 1e-9}  # float64
SOURCES, TARGETS = [11, 7, 1], [9, 4, 1]


@pytest.fixture(params=NETWORKS, ids=lambda name: name.replace(" ", "-"))
def model(request):
    torch.manual_seed(0)
    model = Seq2Seq(network=SIZES | NETWORKS[request.param], begin_token=BEGIN, end_token=END).double().eval()
    # What attention finds has to weigh as much as the token itself, and a head tied to the embedding would repeat that.
    head = model.network.head
    head.weight = torch.nn.Parameter(model.network.decoder.embedding.weight.detach().roll(1, dims=0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.uniform_(-0.2, 0.2)
            elif ".blocks." in name:
                parameter *= 2
    return model


def some(lengths, seed, width, side="right"):
    """A padded batch of sequences of these lengths, with garbage beside them, and its mask."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, VOCAB, (len(lengths), width), generator=generator)
    places, lengths = torch.arange(width)[None], torch.tensor(lengths)[:, None]
    return tokens, places < lengths if side == "right" else places >= width - lengths


def test_padding_changes_no_logit_and_no_gradient(model):
    (source, source_mask), (target, target_mask) = some(SOURCES, 1, 14), some(TARGETS, 2, 12)
    together = model(source, target, source_mask, target_mask)[target_mask]
    alone = torch.cat([
        model(source[i : i + 1, :n], target[i : i + 1, :m])[0]
        for i, (n, m) in enumerate(zip(SOURCES, TARGETS, strict=True))
    ])  # fmt: skip
    torch.testing.assert_close(together, alone, **EQUAL)
    weights = list(model.parameters())
    got, wanted = (torch.autograd.grad(x.square().sum(), weights) for x in (together, alone))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, **EQUAL)


def test_no_logit_depends_on_a_later_target_token_and_each_on_all_of_the_source(model):
    (source, _), (target, _) = some([11], 1, 11), some([9], 2, 9)
    kept = []
    model.network.encoder.embedding.register_forward_hook(lambda module, _, out: kept.append(out) or out)
    changed = target.clone()
    changed[:, 5:] = (target[:, 5:] + 1 - 2) % (VOCAB - 2) + 2
    before, after = model(source, target), model(source, changed)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=0)
    assert not torch.allclose(before[:, 5:], after[:, 5:])
    (grad,) = torch.autograd.grad(before[0, 0].square().sum(), kept[0], retain_graph=True)
    assert (grad[0].norm(dim=-1) > 1e-9).all()


class WithoutState:
    """Decoding that keeps the source and the prefix, and computes everything anew for every token."""

    def __init__(self, model, source, mask, tokens=None):
        self.model, self.source, self.mask = model, source, mask
        self.tokens = source.new_empty(len(source), 0) if tokens is None else tokens

    def select(self, rows):
        mask = None if self.mask is None else self.mask[rows]
        return WithoutState(self.model, self.source[rows], mask, self.tokens[rows])

    @staticmethod
    def step(token, state):
        tokens = torch.cat((state.tokens, token[:, None]), dim=1)
        logits = state.model(state.source, tokens, state.mask)[:, -1]
        return logits.log_softmax(-1), WithoutState(state.model, state.source, state.mask, tokens)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("beam_size", [1, 4])
def test_decoding_on_a_state_equals_decoding_without_and_each_source_alone(model, beam_size, side):
    lengths = [11, 7, 1, 5, 9, 2]
    source, mask = some(lengths, 3, 12, side)
    if side == "left" and model.network_config.rope == "before":
        with pytest.raises(ValueError, match="rope is 'before'"):
            model.generate(source, mask)
        return
    begin = torch.full((6,), BEGIN)
    alpha = 0.6 if beam_size > 1 else 0.0
    found = model.generate(source, mask, beam_size=beam_size, length_penalty=alpha, max_new_tokens=12)
    without = WithoutState(model, source, mask)
    with torch.no_grad():
        wanted = (
            greedy_search(WithoutState.step, without, begin, END, 12)
            if beam_size == 1
            else beam_search(WithoutState.step, without, begin, END, 12, beam_size=beam_size, alpha=alpha)
        )
    assert torch.equal(found.tokens, wanted.tokens)
    torch.testing.assert_close(found.scores, wanted.scores, **EQUAL)
    assert len(set(found.scores.tolist())) == 6  # each source is decoded to something of its own
    for i, n in enumerate(lengths):
        part = slice(12 - n, 12) if side == "left" else slice(0, n)
        alone = model.generate(
            source[i : i + 1, part], beam_size=beam_size, length_penalty=alpha, max_new_tokens=12
        ).tokens
        assert torch.equal(alone[0], found.tokens[i, : alone.shape[1]])
        assert (found.tokens[i, alone.shape[1] :] == END).all()


def test_the_state_of_linear_attention_does_not_grow_with_source_or_target(model):
    def nbytes(n, m):
        state = model.network.read(some([n], 1, n)[0])
        return model.network(some([m], 2, m)[0], None, state)[1].nbytes

    if model.network_config.attention == "linear":
        assert nbytes(3, 2) == nbytes(11, 9)
    else:
        assert nbytes(22, 18) == 2 * nbytes(11, 9)


def test_the_source_is_read_once_a_decoding(model):
    calls = []
    model.network.encoder.register_forward_hook(lambda *_: calls.append("encoder"))
    model.network.decoder.blocks[0].cross_attention.key.register_forward_hook(lambda *_: calls.append("key"))
    source, mask = some(SOURCES, 1, 12)
    model.generate(source, mask, max_new_tokens=6, beam_size=3)
    # Each step projects no keys more: the calls that follow the first are on none.
    assert calls == ["encoder", "key"]


def test_cross_attention_over_a_state_equals_that_over_the_context_itself(model):
    attention = model.network.decoder.blocks[0].cross_attention
    generator = torch.Generator().manual_seed(4)
    x, context = (torch.randn(3, n, 24, dtype=torch.float64, generator=generator) for n in (5, 9))
    mask = torch.arange(9)[None] < torch.tensor([[9], [4], [0]])
    got = attention.attend(x, attention.read(context, mask))
    torch.testing.assert_close(got, attention(x, context=context, key_mask=mask), **EQUAL)
    with pytest.raises(ValueError, match="causal"):
        model.network.decoder.blocks[0].attention.read(context)


def test_one_vocabulary_has_one_embedding_and_two_have_two():
    one = Seq2Seq(network=SIZES, begin_token=BEGIN, end_token=END).network
    assert one.encoder.embedding.weight is one.decoder.embedding.weight is one.head.weight
    two = Seq2Seq(network=SIZES | {"source_vocab_size": 17}, begin_token=BEGIN, end_token=END).network
    assert two.encoder.embedding.weight.shape == (17, 24)
    assert two.decoder.embedding.weight.shape == (VOCAB, 24)


def test_a_target_is_cut_50_tokens_beyond_its_source_and_a_table_of_positions_ends_it():
    def longest(**fields):
        model = Seq2Seq(network=SIZES | fields, begin_token=BEGIN, end_token=END)
        with torch.no_grad():
            model.network.decoder.norm.weight.zero_()  # all tokens alike: the first one, which does not end, wins
        return model.generate(some([5], 1, 5)[0]).tokens.shape[1]

    assert longest() == 55
    assert longest(position="learned", max_length=30) == 30


def test_generation_leaves_the_mode_alone_and_knows_the_tokenizers_vocabulary():
    model = Seq2Seq(network=SIZES | {"vocab_size": 400, "dropout": 0.5})
    model.tokenizer = ByteTokenizer()
    with torch.no_grad():
        model.network.head.weight[257:] *= 100
    source = torch.arange(8)[None]
    first = model.generate(source, max_new_tokens=20)
    assert first.tokens.max() < 257
    assert model.training
    assert torch.equal(model.generate(source, max_new_tokens=20).tokens, first.tokens)
    assert model.generate(source, max_new_tokens=20, beam_size=2).tokens.max() < 257


@pytest.mark.parametrize(
    ("fields", "options", "named"),
    [
        ({"d_modle": 3}, {}, "d_modle"),
        ({"position": "xpos"}, {}, "position"),
        ({"position": "t5"}, {}, "never forms"),
        ({"n_decoder_layers": 0}, {}, "n_decoder_layers"),
        ({"head": "bert"}, {}, "head"),
        ({"embedding_size": 8}, {}, "embedding_size"),
        ({"source_vocab_size": 0}, {}, "source_vocab_size"),
        ({"attention": "softmax", "rope": "before"}, {}, "rope"),
        ({"attention": "softmax", "position": "transformer_xl", "memory_length": 4, "segment_length": 4}, {}, "memory"),
        ({}, {"begin_token": VOCAB}, "begin_token"),
        ({}, {"end_token": -1}, "end_token"),
        ({}, {"label_smoothing": 1.0}, "label_smoothing"),
        ({}, {"beam_size": 0}, "beam_size"),
        ({}, {"length_penalty": -0.1}, "length_penalty"),
        ({}, {"bleu_tokenize": "words"}, "bleu_tokenize"),
    ],
)
def test_a_wrong_or_idle_field_is_refused_by_name(fields, options, named):
    with pytest.raises(ValueError, match=named):
        Seq2Seq(network=SIZES | fields, **{"begin_token": BEGIN, "end_token": END} | options)


def test_a_batch_that_does_not_fit_is_refused_by_name():
    model = Seq2Seq(network=SIZES, begin_token=BEGIN, end_token=END)
    (source, mask), (target, target_mask) = some(SOURCES, 1, 14), some(TARGETS, 2, 12)
    for arguments, named in (
        ((source.float(), target), "source"),
        ((source, target[:2]), "target"),
        ((source, target, mask[:, :3]), "source_mask"),
        ((source, target, mask, target_mask.long()), "target_mask"),
    ):
        with pytest.raises(ValueError, match=named):
            model(*arguments)
    with pytest.raises(ValueError, match="begin_token"):
        model.loss_sum({"source": source, "target": target})
    with pytest.raises(ValueError, match="length_penalty"):
        model.generate(source, length_penalty=0.6)
