"""Two made-up languages, and pairs of sentences in them without end: translation to learn where nothing is downloaded.

A sentence is a meaning, drawn at random, said in both languages. They share the meaning and nothing else:

                       source                              target
    words              roots of one set of syllables       roots of another one
    order              subject verb object place           place object subject verb
    noun phrase        article adjective* noun             noun adjective* article
    number             ending of a plural noun             ending of noun, of each adjective, and of the verb
    gender             –                                   of each noun, by its root; adjectives and articles agree
    case               –                                   ending of the object's noun
    tense              ending of the verb                  a word before the verb
    negation           a word before the verb              ending of the verb
    place              preposition before the phrase       postposition behind it

So a translation has to move phrases, to look each word up, and to carry number and gender to words that show neither in
the source. It is a function of the source, and no two sources have one translation.

Roots, and which meaning comes as which, are drawn from the seed; Python's generators give the same on every machine.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import NamedTuple

KINDS = {"noun": 40, "verb": 20, "adjective": 16, "place": 6}  # how many words of each kind both languages have
SOURCE_SYLLABLES = ("bdgklmnprstv", "aeiou")
TARGET_SYLLABLES = ("fhjqwxzčšž", "äëöüy")
TENSES = 3  # past, present, future
GENDERS = 3


class Phrase(NamedTuple):
    """A noun phrase: its words by their numbers, and how many it speaks of."""

    noun: int
    adjectives: tuple[int, ...]
    plural: bool
    definite: bool


class Meaning(NamedTuple):
    """What a sentence says; `place` is a preposition's number and what stands behind it."""

    subject: Phrase
    verb: int
    object: Phrase | None
    place: tuple[int, Phrase] | None
    tense: int
    negative: bool


@dataclass(frozen=True)
class Language:
    """The words of a language: roots of each kind, and its small words and endings by name."""

    roots: dict[str, list[str]]
    small: dict[str, str]


class LanguagePair:
    """The two languages of a seed.

    Args:
        seed: of the roots, of the nouns' genders, and of the sentences.
    """

    def __init__(self, seed: int = 0) -> None:
        draw = Random(f"languages {seed}")
        self.seed = seed
        tenses = [f"tense {i}" for i in range(TENSES)]
        self.source = _language(draw, SOURCE_SYLLABLES, ["the", "a", "plural", "not", *tenses])
        articles = [f"{which} {gender}" for which, gender in product(("the", "a"), range(GENDERS))]
        agreeing = [f"gender {gender}" for gender in range(GENDERS)]
        self.target = _language(draw, TARGET_SYLLABLES, [*articles, *agreeing, "plural", "object", "not", *tenses])
        self.genders = [draw.randrange(GENDERS) for _ in range(KINDS["noun"])]

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Pairs (source, target) without end, of which none comes twice."""
        seen = set()
        draw = Random(f"sentences {self.seed}")
        while True:
            meaning = _meaning(draw)
            if meaning not in seen:
                seen.add(meaning)
                yield self.say_source(meaning), self.say_target(meaning)

    def say_source(self, meaning: Meaning) -> str:
        """The sentence in the source language."""
        roots, small = self.source.roots, self.source.small

        def phrase(said: Phrase) -> list[str]:
            noun = roots["noun"][said.noun] + (small["plural"] if said.plural else "")
            return [small["the" if said.definite else "a"], *(roots["adjective"][i] for i in said.adjectives), noun]

        words = phrase(meaning.subject)
        words += [small["not"]] if meaning.negative else []
        words += [roots["verb"][meaning.verb] + small[f"tense {meaning.tense}"]]
        words += phrase(meaning.object) if meaning.object else []
        words += [roots["place"][meaning.place[0]], *phrase(meaning.place[1])] if meaning.place else []
        return " ".join(words)

    def say_target(self, meaning: Meaning) -> str:
        """The sentence in the target language."""
        roots, small = self.target.roots, self.target.small

        def phrase(said: Phrase, case: str = "") -> list[str]:
            gender, number = self.genders[said.noun], small["plural"] if said.plural else ""
            noun = roots["noun"][said.noun] + number + case
            adjectives = [roots["adjective"][i] + small[f"gender {gender}"] + number for i in said.adjectives]
            return [noun, *adjectives, small[f"{'the' if said.definite else 'a'} {gender}"]]

        words = [*phrase(meaning.place[1]), roots["place"][meaning.place[0]]] if meaning.place else []
        words += phrase(meaning.object, small["object"]) if meaning.object else []
        words += phrase(meaning.subject)
        verb = roots["verb"][meaning.verb] + (small["plural"] if meaning.subject.plural else "")
        words += [small[f"tense {meaning.tense}"], verb + (small["not"] if meaning.negative else "")]
        return " ".join(words)


def _language(draw: Random, syllables: tuple[str, str], small: list[str]) -> Language:
    """Roots of two syllables, and small words and endings of one, no two of them alike."""
    one = ["".join(pair) for pair in product(*syllables)]
    two = ["".join(pair) for pair in product(one, one)]
    roots = iter(draw.sample(two, sum(KINDS.values())))
    words = {kind: [next(roots) for _ in range(count)] for kind, count in KINDS.items()}
    return Language(words, dict(zip(small, draw.sample(one, len(small)), strict=True)))


def _meaning(draw: Random) -> Meaning:
    def phrase() -> Phrase:
        adjectives = draw.sample(range(KINDS["adjective"]), draw.choice((0, 0, 0, 1, 1, 2)))
        return Phrase(draw.randrange(KINDS["noun"]), tuple(adjectives), draw.random() < 0.5, draw.random() < 0.5)

    return Meaning(
        subject=phrase(),
        verb=draw.randrange(KINDS["verb"]),
        object=phrase() if draw.random() < 0.75 else None,
        place=(draw.randrange(KINDS["place"]), phrase()) if draw.random() < 0.4 else None,
        tense=draw.randrange(TENSES),
        negative=draw.random() < 0.25,
    )
