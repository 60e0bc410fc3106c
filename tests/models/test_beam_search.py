"""Beam search against the search of everything, over a made-up language in which all that came before matters."""

import itertools
import math

import pytest
import torch

from models.beam_search import beam_search, greedy_search, length_penalty

END = 2


class Prefixes:
    """The state of a step function that reads what came before: each row's source and its tokens so far."""

    def __init__(self, source, tokens):
        self.source, self.tokens = source, tokens

    def select(self, rows):
        return Prefixes(self.source[rows], self.tokens[rows])


class Language:
    """log P(next | source, prefix), drawn anew for each prefix, by its numbers."""

    def __init__(self, vocab, sharpness=1.5):
        self.vocab, self.sharpness, self.calls = vocab, sharpness, 0

    def logprobs(self, source, prefix):
        seed = hash((source, *prefix)) % (2**31)
        logits = torch.randn(self.vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return (self.sharpness * logits).log_softmax(-1)

    def step(self, token, state):
        self.calls += 1
        tokens = torch.cat((state.tokens, token[:, None]), dim=1)
        rows = [self.logprobs(int(s), tuple(t.tolist()[1:])) for s, t in zip(state.source, tokens, strict=True)]
        return torch.stack(rows), Prefixes(state.source, tokens)

    def start(self, sources):
        begin = torch.full((sources,), END)
        return Prefixes(torch.arange(sources), begin.new_empty(sources, 0)), begin

    def log_probability(self, source, target):
        return sum(self.logprobs(source, target[:i])[token].item() for i, token in enumerate(target))

    def all_targets(self, longest):
        """Every target that ends, and every one that is cut."""
        words = [token for token in range(self.vocab) if token != END]
        ended = [(*w, END) for n in range(longest) for w in itertools.product(words, repeat=n)]
        return ended, list(itertools.product(words, repeat=longest))


def row(tokens, source):
    """A target up to its end token."""
    tokens = tokens[source].tolist()
    return tuple(tokens[: tokens.index(END) + 1] if END in tokens else tokens)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_a_beam_as_wide_as_the_language_finds_the_best_of_all_targets(alpha):
    language, longest, sources = Language(vocab=3), 4, 6
    ended, _ = language.all_targets(longest)
    state, begin = language.start(sources)
    found = beam_search(language.step, state, begin, END, longest, beam_size=2**longest, alpha=alpha)
    for source in range(sources):
        scores = {y: language.log_probability(source, y) / length_penalty(len(y), alpha) for y in ended}
        best = max(scores, key=scores.get)
        assert row(found.tokens, source) == best
        assert found.scores[source].item() == pytest.approx(scores[best], rel=1e-12)


def test_the_length_penalty_is_that_of_wu_et_al_and_changes_what_is_best():
    assert length_penalty(7, 0.6) == pytest.approx((12 / 6) ** 0.6)
    assert length_penalty(9, 0.0) == 1.0
    language = Language(vocab=3)
    state, begin = language.start(40)
    short, long = (
        beam_search(language.step, state, begin, END, 5, beam_size=32, alpha=alpha).tokens for alpha in (0.0, 3.0)
    )
    lengths = [sum(len(row(tokens, source)) for source in range(40)) for tokens in (short, long)]
    assert lengths[0] < lengths[1]


def test_a_narrow_beam_finds_what_a_search_written_with_lists_finds():
    def by_hand(language, source, K, longest, alpha):  # noqa: N803
        alive, finished = [((), 0.0)], []
        for _ in range(longest):
            extended = [
                ((*y, token), score + logprob)
                for y, score in alive
                for token, logprob in enumerate(language.logprobs(source, y).tolist())
            ]
            extended.sort(key=lambda pair: -pair[1])
            finished += [(y, s / length_penalty(len(y), alpha)) for y, s in extended[:K] if y[-1] == END]
            alive = [(y, s) for y, s in extended if y[-1] != END][:K]
            if len(finished) >= K:
                break
        return max(finished or alive, key=lambda pair: pair[1])[0]

    language, longest = Language(vocab=5, sharpness=1.0), 6
    for K, alpha in ((2, 0.0), (3, 0.6), (4, 1.0)):
        state, begin = language.start(12)
        found = beam_search(language.step, state, begin, END, longest, beam_size=K, alpha=alpha)
        for source in range(12):
            assert row(found.tokens, source) == by_hand(language, source, K, longest, alpha)


def test_a_beam_of_one_is_greedy():
    language = Language(vocab=6)
    state, begin = language.start(20)
    greedy = greedy_search(language.step, state, begin, END, 9)
    beam = beam_search(language.step, state, begin, END, 9, beam_size=1)
    assert {len(row(greedy.tokens, source)) for source in range(20)} > {1, 2, 3}
    for source in range(20):
        target = row(greedy.tokens, source)
        assert row(beam.tokens, source) == target
        assert beam.scores[source].item() == pytest.approx(greedy.scores[source].item(), rel=1e-12)
        assert greedy.scores[source].item() == pytest.approx(language.log_probability(source, target), rel=1e-12)


def test_a_source_is_decoded_alike_alone_and_in_a_batch():
    language = Language(vocab=5)
    state, begin = language.start(10)
    together = beam_search(language.step, state, begin, END, 7, beam_size=3, alpha=0.6)
    for source in range(10):
        one = state.select(torch.tensor([source]))
        alone = beam_search(language.step, one, begin[:1], END, 7, beam_size=3, alpha=0.6)
        assert row(alone.tokens, 0) == row(together.tokens, source)


def test_a_target_that_is_cut_counts_only_where_none_ended():
    class Endless(Language):
        def logprobs(self, source, prefix):
            logprobs = super().logprobs(source, prefix).clone()
            if source == 0:
                logprobs[END] = -math.inf
            return logprobs

    language = Endless(vocab=3)
    state, begin = language.start(2)
    found = beam_search(language.step, state, begin, END, 4, beam_size=16)
    ended, cut = language.all_targets(4)
    assert row(found.tokens, 0) == max(cut, key=lambda y: language.log_probability(0, y))
    assert row(found.tokens, 1) == max(ended, key=lambda y: language.log_probability(1, y))


def test_the_search_ends_once_nothing_better_can_come():
    class Certain(Language):
        def logprobs(self, source, prefix):
            ends = 0.9 if len(prefix) == 1 else 0.001
            others = [(1 - ends) * share for share in (0.999, 0.001)]
            return torch.tensor([*others, ends], dtype=torch.float64).log()

    language = Certain(vocab=3)
    state, begin = language.start(4)
    found = beam_search(language.step, state, begin, END, 50, beam_size=4)
    assert row(found.tokens, 0) == (0, END)
    assert language.calls < 6


def test_a_longer_target_that_only_its_length_makes_better_is_waited_for():
    class Patient(Language):
        """Ends at once with probability 0.6; whoever goes on ends at the sixth token, for certain."""

        def logprobs(self, source, prefix):
            ends = {0: 0.6, 5: 1 - 1e-6}.get(len(prefix), 1e-6)
            return torch.tensor([(1 - ends) * 0.999, (1 - ends) * 0.001, ends], dtype=torch.float64).log()

    language = Patient(vocab=3)
    state, begin = language.start(1)
    # log 0.6 / lp(1) = −0.51 at once, log 0.4 / lp(6) = −0.27 later; and lp(2) would still promise −0.67 only.
    found = beam_search(language.step, state, begin, END, 8, beam_size=3, alpha=2.0)
    assert row(found.tokens, 0) == (0, 0, 0, 0, 0, END)
    assert row(beam_search(language.step, state, begin, END, 8, beam_size=3).tokens, 0) == (END,)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"beam_size": 0}, "beam_size"), ({"beam_size": 2, "alpha": -1.0}, "length_penalty"),
     ({"beam_size": 2, "max_new_tokens": 0}, "max_new_tokens")],
)  # fmt: skip
def test_an_argument_out_of_range_is_refused_by_name(options, named):
    language = Language(vocab=3)
    state, begin = language.start(1)
    with pytest.raises(ValueError, match=named):
        beam_search(language.step, state, begin, END, options.pop("max_new_tokens", 4), **options)
