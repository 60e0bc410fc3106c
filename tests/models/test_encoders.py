"""Encoders: what a mask hides does not matter, everything else does, and BERT's layouts are those of transformers."""

import pytest
import torch
import transformers
from torch import nn

from models import MaskedLM, PairRanker, SequenceClassifier
from tests.helpers import relative

VOCAB = 31
SIZES = {"vocab_size": VOCAB, "d_model": 24, "n_layers": 2, "n_heads": 4}
BERT = {"norm_position": "post", "norm_eps": 1e-12, "bias": True, "embedding_norm": True, "n_token_types": 2}
NETWORKS = {
    "linear rope": {},
    "linear rope before": {"rope": "before"},
    "linear sinusoidal": {"position": "sinusoidal", "embedding_size": 8},
    "linear bert": BERT,
    "linear bare": {"normalize": False, "output_norm": True, "norm": "rms", "ffn": "swiglu"},
    "softmax bert": BERT | {"attention": "softmax", "position": "learned", "max_length": 64},
    "softmax roformer": BERT | {"attention": "softmax", "embedding_size": 8},
    "softmax shaw": {"attention": "softmax", "position": "shaw", "max_distance": 4},
    "softmax transformer_xl": {"attention": "softmax", "position": "transformer_xl"},
    "softmax t5": {"attention": "softmax", "position": "t5", "max_distance": 12, "n_buckets": 8},
    "softmax deberta": {"attention": "softmax", "position": "deberta", "max_distance": 8, "n_token_types": 3},
    "softmax alibi": {"attention": "softmax", "position": "alibi"},
}
MODELS = {
    "masked lm": (MaskedLM, {}),
    "classifier": (SequenceClassifier, {"n_classes": 3}),
    "mean classifier": (SequenceClassifier, {"n_classes": 1, "pooling": "mean", "pooler": "none"}),
    "ranker": (PairRanker, {"pooler": "gelu"}),
}
EQUAL = {"rtol": 1e-9, "atol": 1e-9}  # float64
LENGTHS = [20, 13, 1]


def build(kind, network):
    torch.manual_seed(0)
    cls, options = MODELS[kind]
    model = cls(network=SIZES | NETWORKS[network], **options).double().eval()
    with torch.no_grad():  # scales of one and biases of zero would hide one that is not applied
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.uniform_(0.5, 1.5)
    return model


def some_tokens(rows=3, length=20, seed=1):
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(tokens, side, width=24):
    """Rows of LENGTHS tokens each in a wider batch, garbage beside them, and the mask."""
    out, mask = torch.full((3, width), VOCAB - 1), torch.zeros(3, width, dtype=torch.bool)
    for row, n in enumerate(LENGTHS):
        place = slice(width - n, width) if side == "left" else slice(0, n)
        out[row, place], mask[row, place] = tokens[row, :n], True
    return out, mask


def types_of(model, tokens):
    return tokens % 2 if model.network_config.n_token_types else None


HEADS = [(kind, network) for kind in MODELS for network in ("linear rope", "linear bert", "softmax bert")]
PADDED = [(*case, side) for case in dict.fromkeys([("masked lm", network) for network in NETWORKS] + HEADS)
          for side in ("left", "right")]  # fmt: skip
# φ(R_m q)ᵀ φ(R_n k) depends on m and n themselves: padding on the left, which moves a sequence, is refused.
PADDED.remove(("masked lm", "linear rope before", "left"))


@pytest.mark.parametrize(("kind", "network", "side"), PADDED)
def test_padding_changes_no_output_and_no_gradient(kind, network, side):
    model, tokens = build(kind, network), some_tokens()
    batch, mask = padded(tokens, side)
    together = model(batch, mask, types_of(model, batch))
    together = together[mask] if kind == "masked lm" else together
    alone = [tokens[row : row + 1, :n] for row, n in enumerate(LENGTHS)]
    alone = torch.cat([model(x, None, types_of(model, x)).flatten(0, 1) if kind == "masked lm" else
                       model(x, None, types_of(model, x)) for x in alone])  # fmt: skip
    torch.testing.assert_close(together, alone, **EQUAL)
    weights = list(model.parameters())
    got, wanted = (torch.autograd.grad(x.square().sum(), weights) for x in (together, alone))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, **EQUAL)


@pytest.mark.parametrize("network", NETWORKS, ids=lambda name: name.replace(" ", "-"))
def test_every_place_sees_every_token_and_its_order(network):
    model, tokens = build("masked lm", network), some_tokens(1, 9)
    embedded = model.network.embedding.register_forward_hook(lambda module, _, out: kept.append(out) or out)
    kept = []
    logits = model(tokens)
    embedded.remove()
    for m in (0, 4, 8):
        (grad,) = torch.autograd.grad(logits[0, m].square().sum(), kept[0], retain_graph=True)
        assert (grad[0].norm(dim=-1) > 1e-9).all()
    order = torch.tensor([0, 2, 1, 3, 4, 5, 6, 7, 8])
    assert not torch.allclose(model(tokens[:, order])[0, 4], logits[0, 4])


def copy_layers(theirs, ours, *, positions):
    """Weights of transformers' BERT or RoFormer, encoder and embeddings, into ours; every one of both is used."""
    copied = {}

    def take(mine, weight):
        assert mine.shape == weight.shape
        mine.data.copy_(weight)
        copied[mine.data_ptr()] = mine

    def layer(mine, other):
        take(mine.weight, other.weight)
        take(mine.bias, other.bias)

    embeddings = theirs.embeddings
    take(ours.embedding.weight, embeddings.word_embeddings.weight)
    take(ours.token_types.weight, embeddings.token_type_embeddings.weight)
    layer(ours.embedding_norm, embeddings.LayerNorm)
    if positions:
        take(ours.learned_positions.table.weight, embeddings.position_embeddings.weight)
    if hasattr(theirs, "embeddings_project"):
        layer(ours.projection, theirs.embeddings_project)
    for mine, other in zip(ours.blocks, theirs.encoder.layer, strict=True):
        for name in ("query", "key", "value"):
            layer(getattr(mine.attention, name), getattr(other.attention.self, name))
        layer(mine.attention.output, other.attention.output.dense)
        layer(mine.attention_norm, other.attention.output.LayerNorm)
        layer(mine.feed_forward.inner, other.intermediate.dense)
        layer(mine.feed_forward.output, other.output.dense)
        layer(mine.feed_forward_norm, other.output.LayerNorm)
    assert copied.keys() == {parameter.data_ptr() for parameter in ours.parameters()}


LAYOUTS = ["bert", "roformer", "roformer-narrow"]


def layout(name):
    """transformers' configuration, and ours."""
    theirs = {
        "vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 40, "max_position_embeddings": 32, "num_labels": 3, "pad_token_id": 0,
    }  # fmt: skip
    ours = SIZES | BERT | {"attention": "softmax", "d_ff": 40}
    if name == "bert":
        return transformers.BertConfig(**theirs), ours | {"position": "learned", "max_length": 32}
    width = 8 if name == "roformer-narrow" else 24
    config = transformers.RoFormerConfig(**theirs, embedding_size=width)
    return config, ours | ({"embedding_size": 8} if width == 8 else {})


def randomized(theirs):
    """Random weights everywhere, norms and biases too."""
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "embed_positions" not in name:
                parameter.normal_(1.0 if "LayerNorm.weight" in name else 0.0, 0.2)
    return theirs.eval()


def inputs():
    tokens = some_tokens(3, 18)
    mask = torch.arange(18)[None] < torch.tensor([[18], [11], [2]])
    return tokens, mask, (torch.arange(18)[None] > torch.tensor([[9], [4], [0]])).long()


@pytest.mark.parametrize("name", LAYOUTS)
def test_masked_lm_gives_the_logits_of_transformers_with_its_weights(name):
    torch.manual_seed(0)
    config, network = layout(name)
    theirs = randomized((transformers.BertForMaskedLM if name == "bert" else transformers.RoFormerForMaskedLM)(config))
    ours = MaskedLM(network=network).eval()
    copy_layers(theirs.bert if name == "bert" else theirs.roformer, ours.network, positions=name == "bert")
    predictions = theirs.cls.predictions
    with torch.no_grad():
        ours.head.transform.load_state_dict(predictions.transform.dense.state_dict())
        ours.head.norm.load_state_dict(predictions.transform.LayerNorm.state_dict())
        ours.head.output.bias.copy_(predictions.decoder.bias)
        assert torch.equal(ours.head.output.weight, predictions.decoder.weight)  # tied in both
        tokens, mask, types = inputs()
        wanted = theirs(tokens, attention_mask=mask.long(), token_type_ids=types).logits
        got = ours(tokens, mask, types)
    assert relative(got[mask], wanted[mask]) < 1e-5


@pytest.mark.parametrize("name", LAYOUTS)
def test_classifier_gives_the_logits_of_transformers_with_its_weights(name):
    torch.manual_seed(0)
    config, network = layout(name)
    kind = "Bert" if name == "bert" else "RoFormer"
    theirs = randomized(getattr(transformers, f"{kind}ForSequenceClassification")(config))
    ours = SequenceClassifier(network=network, n_classes=3, pooler="tanh" if name == "bert" else "gelu").eval()
    body = theirs.bert if name == "bert" else theirs.roformer
    copy_layers(body, ours.network.encoder, positions=name == "bert")
    dense, output = (
        (body.pooler.dense, theirs.classifier)
        if name == "bert"
        else (theirs.classifier.dense, theirs.classifier.out_proj)
    )
    with torch.no_grad():
        ours.network.dense.load_state_dict(dense.state_dict())
        ours.network.output.load_state_dict(output.state_dict())
        tokens, mask, types = inputs()
        wanted = theirs(tokens, attention_mask=mask.long(), token_type_ids=types).logits
        got = ours(tokens, mask, types)
    assert relative(got, wanted) < 1e-5


def test_the_pre_norm_layout_normalises_each_branch_and_the_end():
    model = build("masked lm", "linear rope")
    calls = []
    for name, module in model.network.named_modules():
        if isinstance(module, nn.LayerNorm):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    model(some_tokens())
    layers = [f"blocks.{i}.{branch}_norm" for i in range(2) for branch in ("attention", "feed_forward")]
    assert calls == [*layers, "norm"]


def test_token_types_default_to_zero_and_are_refused_where_there_are_none():
    with_types, without = build("masked lm", "linear bert"), build("masked lm", "linear rope")
    tokens = some_tokens()
    assert torch.equal(with_types(tokens), with_types(tokens, None, torch.zeros_like(tokens)))
    assert not torch.equal(with_types(tokens), with_types(tokens, None, torch.ones_like(tokens)))
    with pytest.raises(ValueError, match="n_token_types"):
        without(tokens, None, torch.zeros_like(tokens))
    with pytest.raises(ValueError, match=r"token_types has shape"):
        with_types(tokens, None, torch.zeros(3, 5, dtype=torch.int64))


def test_the_ranker_scores_pairs_by_one_function():
    model = build("ranker", "linear rope").float()
    first, second = some_tokens(seed=1), some_tokens(length=11, seed=2)
    one = model.margins({"first_tokens": first, "second_tokens": second})
    other = model.margins({"first_tokens": second, "second_tokens": first})
    assert torch.equal(one, -other)
    torch.testing.assert_close(one, model(first) - model(second))


@pytest.mark.parametrize("kind", ["masked lm", "classifier", "ranker"])
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"d_modle": 3}, "d_modle"),
        ({"position": "xpos"}, "position"),
        ({"position": "t5"}, "never forms"),
        (
            {"attention": "softmax", "position": "transformer_xl", "memory_length": 4, "segment_length": 4},
            "memory_length",
        ),
        ({"n_token_types": -1}, "n_token_types"),
        ({"embedding_size": 0}, "embedding_size"),
        ({"norm_position": "mid"}, "norm_position"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"head": "bert"}, "head"),
        ({"attention": "softmax", "feature_map": "relu"}, "feature_map"),
        ({"position": "learned"}, "max_length"),
        ({"d_model": 25}, "d_model"),
    ],
)
def test_a_wrong_or_idle_field_is_refused_by_name(kind, fields, named):
    cls, options = MODELS[kind]
    with pytest.raises(ValueError, match=named):
        cls(network=SIZES | fields, **options)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"n_classes": 0}, "n_classes"), ({"pooling": "max"}, "pooling"), ({"pooler": "relu"}, "pooler")],
)
def test_a_wrong_argument_of_the_classifier_is_refused_by_name(options, named):
    with pytest.raises(ValueError, match=named):
        SequenceClassifier(network=SIZES, **options)


@pytest.mark.parametrize(
    ("n_classes", "labels"),
    [(3, torch.tensor([0, 3])), (3, torch.tensor([-1, 0])), (3, torch.rand(2)), (1, torch.tensor([0, 1])),
     (3, torch.tensor([[0], [1]]))],
)  # fmt: skip
def test_labels_that_are_not_of_the_task_are_refused(n_classes, labels):
    model = SequenceClassifier(network=SIZES, n_classes=n_classes)
    with pytest.raises(ValueError, match="labels"):
        model.loss_sum({"tokens": some_tokens(2), "labels": labels})


def test_padding_on_the_left_is_refused_where_it_would_change_what_is_computed():
    with pytest.raises(ValueError, match="rope is 'before'"):
        build("masked lm", "linear rope before")(*padded(some_tokens(), "left"))


def test_tokens_that_are_no_integers_are_refused():
    with pytest.raises(ValueError, match="tokens"):
        build("masked lm", "linear rope")(torch.rand(2, 5))
