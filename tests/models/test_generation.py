"""A text is continued in a batch as it is alone, up to its stop, in memory that does not grow."""

import random
from itertools import pairwise, zip_longest

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from lin_attn.data import ByteTokenizer, SubwordTokenizer
from models import CausalLM
from models.completion import StopTexts, TokenText
from models.generation import read
from models.sampling import penalized, sample

SIZES = {"vocab_size": 257, "d_model": 24, "n_layers": 2, "n_heads": 4}
NETWORKS = {
    "linear": {},
    "linear before": {"rope": "before"},
    "linear sinusoidal": {"position": "sinusoidal"},
    "linear learned": {"position": "learned", "max_length": 64},
    "softmax": {"attention": "softmax"},
    "softmax t5": {"attention": "softmax", "position": "t5", "max_distance": 12, "n_buckets": 8},
    "softmax segments": {
        "attention": "softmax",
        "position": "transformer_xl",
        "memory_length": 4,
        "segment_length": 5,
    },
}
TEXTS = ["def ", "import numpy as np\nfrom ", "", "class A(B):", "class C(D):", "ü é"]
WAYS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.3, "top_k": 50, "seed": 3},
    "nucleus, penalty": {"temperature": 2.0, "top_p": 0.8, "repetition_penalty": 1.5, "seed": 4},
    "greedy, penalty": {"temperature": 0, "repetition_penalty": 1.2},
    "seeds of their own": {"seed": range(len(TEXTS))},
}


def build(fields, tokenizer=True):
    torch.manual_seed(0)
    model = CausalLM(network=SIZES | fields).eval()
    with torch.no_grad():  # sharper than at the start of training, so that choices are not near a tie
        for block in model.network.blocks:
            block.feed_forward.output.weight *= 8
            block.attention.output.weight *= 8
    model.tokenizer = ByteTokenizer()
    return model


@pytest.fixture(params=NETWORKS, ids=lambda name: name.replace(" ", "-"))
def model(request):
    return build(NETWORKS[request.param])


@pytest.mark.parametrize("way", WAYS)
def test_a_text_is_continued_in_a_batch_as_alone(model, way):
    options = dict(WAYS[way])
    together = model.complete(TEXTS, 14, batch_size=4, **options)
    seeds = options.pop("seed", None)
    for i, text in enumerate(TEXTS):
        own = {} if seeds is None else {"seed": seeds if isinstance(seeds, int) else seeds[i]}
        assert model.complete(text, 14, **options, **own) == together[i]
        row = torch.tensor([[256, *text.encode()]])
        tokens = model.generate(row, 14, stop_token=256, **options, **own)[0, row.shape[1] :]
        assert ByteTokenizer().decode(tokens.tolist()).decode("utf-8", "replace") == together[i]
    assert len(set(together)) > 1


def test_each_text_of_a_batch_ends_before_its_own_stop(model):
    options = {"temperature": 1.5, "seed": 2}
    free = model.complete(TEXTS, 16, **options)
    stops = [free[0][8:11], free[1][4:6], free[5][-2]]
    stopped = model.complete(TEXTS, 16, batch_size=4, stop=stops, **options)
    for text, whole, part in zip(TEXTS, free, stopped, strict=True):
        assert model.complete(text, 16, stop=stops, **options) == part
        ends = [(whole.index(stop) + len(stop), whole.index(stop)) for stop in stops if stop in whole]
        assert part == (whole[: min(ends)[1]] if ends else whole)
    assert sum(part != whole for whole, part in zip(free, stopped, strict=True)) >= 3


def test_streamed_pieces_are_the_text_and_come_as_they_are_drawn():
    model, options = build({}), {"temperature": 1.5, "seed": 1, "stop": ["zz"]}
    wanted = model.complete(TEXTS, 20, **options)
    heard = [[] for _ in TEXTS]
    model.complete(TEXTS, 20, on_text=lambda row, piece: heard[row].append(piece), **options)
    assert ["".join(pieces) for pieces in heard] == wanted
    assert all(piece for pieces in heard for piece in pieces)
    drawn = []
    model.network.register_forward_hook(lambda *_: drawn.append(1))
    steps = []
    for piece in model.stream_text(TEXTS[1], 20, **options):
        assert piece == heard[1][len(steps)]
        steps.append(len(drawn))
    assert len(steps) == len(heard[1]) > 5
    assert all(before < after for before, after in pairwise(steps[:-1]))  # each before the next token is drawn


def test_a_row_draws_what_it_draws_alone_and_a_seed_a_row_is_kept_apart():
    model = build({})
    tokens = torch.randint(256, (1, 9)).expand(4, 9)
    alike = model.generate(tokens, 12, seed=5)
    assert all(torch.equal(row, alike[0]) for row in alike)
    assert torch.equal(model.generate(tokens[:1], 12, seed=5), alike[:1])
    apart = model.generate(tokens, 12, seed=[5, 6, 7, 5])
    assert torch.equal(apart[0], alike[0])
    assert torch.equal(apart[3], alike[0])
    assert len({tuple(row) for row in apart.tolist()}) == 3


@pytest.mark.parametrize("name", ["linear", "softmax"])
def test_a_step_keeps_a_state_of_one_size_with_linear_attention_and_softmax_keeps_every_token(name):
    model = build(NETWORKS[name])
    sizes = []
    model.network.register_forward_hook(lambda module, given, out: sizes.append(out[1].nbytes))
    model.complete(["def ", "a longer beginning "], 50, seed=0, temperature=2.0, repetition_penalty=1.1)
    steps = {after - before for before, after in pairwise(sizes)}
    assert len(sizes) > 20
    assert steps == {0} if name == "linear" else min(steps) > 0


def test_a_long_prompt_is_read_in_pieces_and_gives_the_same_state(model, monkeypatch):
    tokens = torch.randint(256, (2, 61), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, _ = read(model, tokens)
        pieces = []
        model.network.register_forward_hook(lambda module, given, out: pieces.append(given[0].shape[1]))
        monkeypatch.setattr("models.generation.READ", 16)
        torch.testing.assert_close(read(model, tokens)[0], whole, rtol=1e-4, atol=1e-5)
    assert max(pieces) <= 16
    assert len(pieces) > 3


def test_the_penalty_is_that_of_transformers():
    generator = torch.Generator().manual_seed(0)
    logits, tokens = torch.randn(3, 20, generator=generator), torch.randint(20, (3, 7), generator=generator)
    processor = transformers.RepetitionPenaltyLogitsProcessor(1.7)
    seen = torch.zeros(3, 20, dtype=torch.bool).scatter_(1, tokens, True)
    torch.testing.assert_close(penalized(logits, seen, 1.7), processor(tokens, logits))


def test_the_penalty_is_on_prompt_and_drawn_tokens_and_neither_on_padding_nor_on_the_stop():
    model = build({})
    tokens, mask = torch.tensor([[7, 7, 3, 4, 256]]), torch.tensor([[False, False, True, True, True]])
    model.tokenizer = None
    logits = torch.linspace(5, 1, 257)
    with torch.no_grad():
        model.network.head = torch.nn.Linear(24, 257)
        model.network.head.weight.zero_()
    order = []
    for stop, first in ((None, [0, 1, 2, 5, 6, 7, 8]), (256, [256])):
        with torch.no_grad():
            model.network.head.bias.copy_(logits)
            model.network.head.bias[256] = 5.5  # the likeliest, were it not seen
        drawn = model.generate(tokens, 7, key_mask=mask, temperature=0, repetition_penalty=100.0, stop_token=stop)
        order.append(drawn[0, 5:].tolist())
        assert order[-1] == first


def test_the_first_stop_that_is_complete_ends_a_text_however_it_is_cut():
    chance = random.Random(0)
    for _ in range(1000):
        text = "".join(chance.choice("aab") for _ in range(chance.randint(0, 12)))
        lengths = [chance.randint(1, 5) for _ in range(chance.randint(0, 3))]
        stops = ["".join(chance.choice("aab") for _ in range(length)) for length in lengths]
        found = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
        wanted = text[: min(found)[1]] if found else text
        cuts = sorted({0, len(text), *(chance.randint(0, len(text)) for _ in range(chance.randint(0, 6)))})
        through, out = StopTexts(stops), ""
        for a, b in pairwise(cuts):
            out += through.add(text[a:b])
            assert wanted.startswith(out)  # nothing has to be taken back
        assert out + through.finish() == wanted
        assert through.found == bool(found)


def test_a_character_of_several_bytes_comes_whole_and_a_broken_one_is_marked():
    text = TokenText(ByteTokenizer())
    pieces = [text.add(byte) for byte in "aü".encode()]
    assert pieces == ["a", "", "ü"]
    assert text.add(0xC3) == ""
    assert text.add(256) == "\ufffd"
    assert text.ended
    assert text.add(65) == ""


def test_the_first_word_keeps_the_blank_that_its_place_gives_it():
    words = {"<end>": 0, "▁all": 1, "▁the": 2, "▁foxes": 3, "▁": 4}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="▁"))
    inner.pre_tokenizer, inner.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    inner.add_special_tokens(["<end>"])
    tokenizer = SubwordTokenizer(inner.to_str(), "<end>")
    model = CausalLM(network=SIZES | {"vocab_size": 8}).eval()
    model.tokenizer = tokenizer
    drawn = model.generate(torch.tensor([[0, 1]]), 6, temperature=0, stop_token=0)[0]
    wanted = tokenizer.decode(drawn).decode().removeprefix("all")
    assert wanted
    assert model.complete("all", 6, temperature=0) == wanted
    text = TokenText(tokenizer, prompt=[0, 1])
    assert [text.add(token) for token in (2, 3, 0)] == [" the", " foxes", ""]


def test_the_mode_comes_back_when_a_stream_is_left():
    model = build({"dropout": 0.5})
    model.train()
    assert model.complete("a", 5, seed=0) == model.complete("a", 5, seed=0)
    stream = model.stream(torch.tensor([[1, 2]]), 5, seed=0)
    next(stream)
    assert model.training  # between steps too, whether the stream is ended or not
    stream.close()
    assert model.training


def test_two_streams_side_by_side_are_those_one_after_the_other_and_leave_every_mode():
    model = build({"dropout": 0.5})
    model.train()
    model.network.blocks[0].eval()
    alone = ["".join(model.stream_text(text, 6, seed=0)) for text in ("a", "bcd")]
    pieces = ["", ""]
    for both in zip_longest(*(model.stream_text(text, 6, seed=0) for text in ("a", "bcd")), fillvalue=""):
        pieces = [have + new for have, new in zip(pieces, both, strict=True)]
    assert pieces == alone
    assert model.training
    assert not model.network.blocks[0].training


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda model: model.complete("a", 3, stop="b"), "stop"),
        (lambda model: model.complete("a", 3, stop=[""]), "stop"),
        (lambda model: model.complete(["a"], 3, seed=[1, 2]), "seed"),
        (lambda model: model.complete("a", 3, stop=None), "stop"),
        (lambda model: model.complete("a", 3, seed=2**64), "seed"),
        (lambda model: model.complete("a", 3, seed=1.5), "seed"),
        (lambda model: model.complete(["a"], 3, seed=["1"]), "seed"),
        (lambda model: model.complete([3], 3), "texts"),
        (lambda model: model.complete(None, 3), "texts"),
        (lambda model: model.score(3), "texts"),
        (lambda model: model.generate(torch.tensor([[1, 257]]), 3), "tokens are from 1 to 257"),
        (lambda model: model.generate(torch.tensor([[-1, 2]]), 3), "tokens are from -1 to 2"),
        (lambda model: model.complete("a", 1.5), "max_new_tokens"),
        (lambda model: model.complete(["a"], 3, batch_size=0), "batch_size"),
        (lambda model: model.complete("a", -1), "max_new_tokens"),
        (lambda model: model.complete("a", 3, repetition_penalty=0.0), "repetition_penalty"),
        (lambda model: model.generate(["a"], 3), "complete"),
        (lambda model: model.generate(torch.zeros(1, 2, dtype=torch.int64), 3, stop_token=257), "stop_token"),
        (lambda model: model.generate(torch.zeros(2, 2, dtype=torch.int64), 3, seed=[1]), "seed"),
        (
            lambda model: model.stream(
                torch.zeros(1, 2, dtype=torch.int64), 3, key_mask=torch.ones(1, 3, dtype=torch.bool)
            ),
            "key_mask",
        ),
        (lambda model: build({"position": "learned", "max_length": 8}).complete("abcd", 5), "at most 4"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name_before_anything_is_drawn(call, named):
    with pytest.raises(ValueError, match=named):
        call(build({}))


def test_texts_stops_and_seeds_that_come_one_by_one_are_all_read():
    model, texts = build({}), ["a", "bc"]
    options = {"temperature": 1.0, "stop": ["e", "t"], "seed": [1, 2]}
    one_by_one = {"temperature": 1.0, "stop": iter(["e", "t"]), "seed": np.array([1, 2])}
    assert model.complete(iter(texts), 30, **one_by_one) == model.complete(texts, 30, **options)
    assert model.complete(texts, 5, seed=np.int64(3)) == model.complete(texts, 5, seed=3)
    assert model.score(iter(texts)) == model.score(texts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_ends_of_temperature_and_penalty_are_limits_and_no_overflow(dtype):
    logits = torch.tensor([[1.0, 3.0, -2.0], [-1.0, -5.0, -3.0]], dtype=dtype)
    for temperature in (1e-30, 1e-40, 5e-324):
        assert sample(logits, temperature=temperature).tolist() == [1, 0]
    seen = torch.ones_like(logits, dtype=torch.bool)
    for penalty in (1e-300, 1e-40, 1e40, 1e300):
        token = sample(penalized(logits, seen, penalty), generator=torch.Generator().manual_seed(0))
        assert ((token >= 0) & (token < 3)).all()


def test_no_rows_are_continued_to_no_rows_with_seed_or_without():
    model, none = build({}), torch.zeros(0, 2, dtype=torch.int64)
    assert model.generate(none, 3).shape == model.generate(none, 3, seed=0).shape == (0, 5)


def test_a_model_without_a_tokenizer_says_so():
    with pytest.raises(ValueError, match="tokenizer"):
        CausalLM(network=SIZES).complete("a", 3)


def test_a_wrong_option_is_no_option():
    with pytest.raises(TypeError, match="temprature"):
        build({}).complete("a", 3, temprature=0)


def test_segments_and_rope_before_refuse_padding_and_take_texts_of_every_length():
    tokens, mask = torch.zeros(2, 7, dtype=torch.int64), torch.ones(2, 7, dtype=torch.bool)
    mask[0, 0] = False
    for name, field in (("softmax segments", "segment_length"), ("linear before", "rope")):
        with pytest.raises(ValueError, match=field):
            build(NETWORKS[name]).generate(tokens, 2, key_mask=mask)
