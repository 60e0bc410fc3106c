"""Vectors of texts are those of each text alone; guesses are the model's own probabilities of the masked place."""

import pytest
import torch

from lin_attn.data import ByteTokenizer
from lin_attn.data.special_tokens import SpecialTokens
from models import MaskedLM, SequenceClassifier

SIZES = {"vocab_size": 264, "d_model": 24, "n_layers": 2, "n_heads": 4}
NETWORKS = {
    "linear": {},
    "linear before": {"rope": "before"},
    "softmax t5": {"attention": "softmax", "position": "t5"},
    "bert": {
        "attention": "softmax", "position": "learned", "max_length": 80, "norm_position": "post",
        "embedding_norm": True, "n_token_types": 2, "embedding_size": 12,
    },
}  # fmt: skip
TEXTS = ["the fox", "a", "", "jumps over the lazy dog " * 2, "ü"]
TOKENIZER = SpecialTokens(ByteTokenizer())
CLASS, SEPARATOR, MASK = (TOKENIZER.ids[name] for name in ("class", "separator", "mask"))


def build(fields, kind=MaskedLM):
    torch.manual_seed(0)
    model = kind(network=SIZES | fields).eval()
    model.tokenizer = TOKENIZER
    return model


@pytest.mark.parametrize("pooling", ["mean", "first"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_vector_is_that_of_its_text_alone(name, pooling):
    for kind in (MaskedLM, SequenceClassifier):
        model = build(NETWORKS[name], kind)
        encoder = model.network if kind is MaskedLM else model.network.encoder
        vectors = model.embed(TEXTS, pooling, batch_size=3)
        assert vectors.dtype == torch.float32
        assert not vectors.requires_grad
        for text, vector in zip(TEXTS, vectors, strict=True):
            hidden = encoder(torch.tensor([[CLASS, *text.encode(), SEPARATOR]]))[0]
            torch.testing.assert_close(
                vector, hidden[0] if pooling == "first" else hidden.mean(0), rtol=1e-5, atol=1e-5
            )


def test_a_vector_without_a_frame_is_of_the_text_and_half_precision_is_widened():
    model = build({})
    hidden = model.network(torch.tensor([list(b"the fox")]))[0]
    torch.testing.assert_close(model.embed(["the fox"], framed=False)[0], hidden.mean(0), rtol=1e-5, atol=1e-5)
    assert model.bfloat16().embed(TEXTS).dtype == torch.float32


@pytest.mark.parametrize("framed", [True, False])
def test_guesses_are_the_likeliest_tokens_of_each_marked_place(framed):
    model = build({"vocab_size": 300})
    with torch.no_grad():
        model.head.output.bias[[MASK, SEPARATOR, 256, 290]] = 50.0  # likely, and no text
        model.head.output.bias[ord("q")] = 49.0
    guesses = model.fill_mask("a [MASK]b[MASK]", 4, framed=framed)
    row = [*b"a ", MASK, *b"b", MASK]
    row = [CLASS, *row, SEPARATOR] if framed else row
    probabilities = model(torch.tensor([row]))[0].softmax(-1)
    for place, guessed in zip([i for i, token in enumerate(row) if token == MASK], guesses, strict=True):
        assert [guess.token for guess in guessed] == probabilities[place, :256].topk(4).indices.tolist()
        for guess in guessed:
            assert guess.probability == pytest.approx(probabilities[place, guess.token].item(), rel=1e-5)
            assert guess.text == bytes([guess.token]).decode("utf-8", "replace")
        assert guessed[0].text == "q"
        assert guessed[0].probability < 0.5
    again = model.fill_mask("a _b_", 4, marker="_", framed=framed)
    assert again == guesses
    assert len(model.fill_mask("[MASK]", 1000)[0]) == 256


def test_what_cannot_be_meant_is_refused_by_name():
    model, plain = build({}), build({})
    plain.tokenizer = ByteTokenizer()
    for call, named in (
        (lambda: model.embed("text"), "texts"),
        (lambda: model.embed(["a"], "max"), "pooling"),
        (lambda: model.embed(["a", ""], framed=False), "no token"),
        (lambda: plain.embed(["a"]), "framed"),
        (lambda: model.fill_mask("a"), "marker"),
        (lambda: model.fill_mask("a", marker=""), "marker"),
        (lambda: model.fill_mask("[MASK]", 0), "top_k"),
        (lambda: plain.fill_mask("[MASK]"), "mask token"),
        (lambda: build(NETWORKS["bert"]).embed(["a" * 79]), "max_length"),
    ):
        with pytest.raises(ValueError, match=named):
            call()
