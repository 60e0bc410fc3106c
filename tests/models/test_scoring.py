"""A text's score is that of its document alone, whatever the batch and the blocks it is read in."""

import math

import pytest
import torch

from models.scoring import score_texts, score_tokens
from tests.models.test_generation import NETWORKS, build

TEXTS = ["def f(x):\n    return x\n", "a", "ü é " * 9, "", "import numpy as np\n" * 2, b"\xff\x00bytes"]
# Sums of float32 losses of a few tokens each.
CLOSE = 1e-5


@pytest.fixture(
    params=[name for name in NETWORKS if name != "softmax segments"], ids=lambda name: name.replace(" ", "-")
)
def model(request):
    return build(NETWORKS[request.param])


def test_bits_per_byte_are_those_of_the_definition(model):
    for text, bits, rest in zip(
        TEXTS, model.score(TEXTS, block_length=7), model.score(TEXTS, with_end=False), strict=True
    ):
        data = text if isinstance(text, bytes) else text.encode()
        tokens = torch.tensor([256, *data, 256])
        logprobs = model.double()(tokens[None, :-1])[0].log_softmax(-1)
        nats = -logprobs.gather(1, tokens[1:, None]).sum().item()
        end = -logprobs[-1, 256].item()
        model.float()
        if not data:
            assert math.isnan(bits)
            continue
        assert bits == pytest.approx(nats / math.log(2) / len(data), rel=CLOSE)
        assert rest == pytest.approx((nats - end) / math.log(2) / len(data), rel=CLOSE)


@pytest.mark.parametrize("name", NETWORKS)
def test_neither_batch_nor_block_changes_a_score(name):
    model = build(NETWORKS[name])
    alone = [score_texts(model, [text])[0] for text in TEXTS]
    for options in ({}, {"batch_size": 2}, {"block_length": 5}, {"batch_size": 4, "block_length": 1}):
        for got, wanted in zip(score_texts(model, TEXTS, **options), alone, strict=True):
            assert got.n_tokens == wanted.n_tokens
            assert got.nats == pytest.approx(wanted.nats, rel=CLOSE)
            assert got.greedy == wanted.greedy


def test_a_long_text_is_read_in_blocks_from_a_state_of_one_size():
    model = build({})
    seen = []
    model.network.register_forward_hook(lambda module, given, out: seen.append((given[0].shape[1], out[1].nbytes)))
    model.score(["ab" * 500], block_length=100)
    assert [length for length, _ in seen] == [100] * 10 + [1]
    assert len({size for _, size in seen}) == 1


def test_only_what_follows_the_context_counts_and_greedy_is_told():
    model = build({})
    prompt = torch.tensor([[256, *b"def "]])
    likeliest = model.generate(prompt, 9, temperature=0)[0].numpy()
    other = likeliest.copy()
    other[9] = (other[9] + 1) % 256
    whole, a, b, one = score_tokens(
        model, [(likeliest, 1), (likeliest, 5), (other, 5), (likeliest, len(likeliest) - 1)], block_length=4
    )
    assert (whole.n_tokens, a.n_tokens, b.n_tokens, one.n_tokens) == (13, 9, 9, 1)
    assert a.greedy
    assert not b.greedy
    logprobs = model(torch.from_numpy(other)[None])[0].log_softmax(-1)
    wanted = -sum(logprobs[i, other[i + 1]].item() for i in range(4, 13))
    assert b.nats == pytest.approx(wanted, rel=CLOSE)
    assert whole.nats > a.nats > one.nats > 0


def test_dropout_is_off_and_the_mode_comes_back():
    model = build({"dropout": 0.5})
    wanted = model.score(["abc"])
    model.train()
    assert model.score(["abc"]) == wanted
    assert model.training
    assert model.score([]) == []


def test_what_cannot_be_scored_is_refused_by_name():
    model = build({})
    for call, named in (
        (lambda: model.score("abc"), "texts"),
        (lambda: model.score(["abc"], block_length=0), "block_length"),
        (lambda: model.score(["abc"], batch_size=0), "batch_size"),
        (lambda: score_tokens(model, [(torch.arange(3).numpy(), 0)]), "counts from 0"),
        (lambda: build({"position": "learned", "max_length": 8}).score(["abcdefghijk"]), "max_length"),
    ):
        with pytest.raises(ValueError, match=named):
            call()
    model.tokenizer = None
    with pytest.raises(ValueError, match="tokenizer"):
        model.score(["abc"])
