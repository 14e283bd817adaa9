"""Makes a document a vector of 1,024 numbers, by rules, with nothing to download.

Every word has a fixed place in the vector, so a small edit of the text is a small change of the vector:
that is why vectors keep the length of their text, and searching, not embedding, makes up for it.
"""

from __future__ import annotations

import re
from collections import Counter
from hashlib import blake2b
from math import log
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from delta_prop.demo.corpus import Document

DIMENSION = 1024
POSITIONS = 4
"""A word's places, one in each quarter of the vector, so that no two of them coincide."""

TEXT_WEIGHT = 0.5
SUMMARY_WEIGHT = 1.5
MODULE_WEIGHT = 1.0
NAME_WEIGHT = 1.5
EXTRA_WEIGHT = 0.5
"""What one word adds where it stands; where it stands in several places, these add up."""

RARITY_POWER = 0.75
"""Below 1, so that two words of a query that are found say more than one that is found and rare."""

PRIVATE_FACTOR = 0.5
DEPTH_FACTOR = 0.9
"""Private names, and modules deep inside packages, are seldom what somebody looks for."""

_SUMMARY_CHARACTERS_MAX = 300
_REPEATS_MAX = 3.0
_WORDS_KNOWN_MAX = 1_000_000
_QUARTER = DIMENSION // POSITIONS

_STOP_TEXT = """
    a about above after all also an and any are as at be because been before being below between both but
    by can could did do does doing don down during each either etc few for from further had has have having
    he her here his how i if in into is it its itself just may me might more most must my no nor not of off
    on once only or other our out over own same self shall she should so some such than that the their them
    then there these they this those through to too under until up very was we were what when where whether
    which while who whom why will with within would you your none true false cls def class
"""
STOP_WORDS = frozenset(_STOP_TEXT.split())


class Embedding:
    """The rules and the weights of words, which `learn` freezes from the first documents.

    Frozen, because a weight that moved with each new document would move every vector with it.
    """

    def __init__(self) -> None:
        self._weights: dict[str, float] = {}
        self._rare = 1.0
        self._places: dict[str, tuple[NDArray[np.intp], NDArray[np.float64]]] = {}

    def learn(self, documents: Iterable[Document]) -> None:
        """Count in how many documents each word stands: the rarer, the more it says."""
        counts: Counter[str] = Counter()
        number = 0
        for document in documents:
            number += 1
            counts.update(set(_amounts(document)))
        self._weights = {word: _rarity(number, count) for word, count in counts.items()}
        self._rare = _rarity(number, 0)

    def document(self, document: Document) -> NDArray[np.float32]:
        """The vector of a document."""
        factor = DEPTH_FACTOR ** document.module.count(".") * (PRIVATE_FACTOR if document.private else 1.0)
        return self._sum(_amounts(document)) * np.float32(factor)

    def query(self, text: str) -> NDArray[np.float32]:
        """The vector of what somebody types."""
        return self._sum(Counter(words(text)))

    def _sum(self, amounts: Mapping[str, float]) -> NDArray[np.float32]:
        # In order of words, so that a sum is rounded alike whatever else stands in the text.
        chosen = sorted(amounts)
        if not chosen:
            return np.zeros(DIMENSION, np.float32)
        places, signs = zip(*map(self._place, chosen), strict=True)
        weights = [amounts[word] * self._weights.get(word, self._rare) for word in chosen]
        scaled = np.concatenate(signs) * np.repeat(weights, POSITIONS)
        return np.bincount(np.concatenate(places), scaled, DIMENSION).astype(np.float32)

    def _place(self, word: str) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        known = self._places.get(word)
        if known is None:
            if len(self._places) >= _WORDS_KNOWN_MAX:
                self._places.clear()
            known = self._places[word] = _place(word)
        return known


def words(text: str) -> list[str]:
    """The words that count: identifiers split at underscores and humps, stop words out, endings off."""
    return [word for one in _WORDS.findall(text) for word in _parts(one)]


def stem(word: str) -> str:
    """A word without the ending that its use in a sentence gave it; not always a word itself."""
    for ending, instead, left_min in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= left_min:
            word = word[: len(word) - len(ending)] + instead
            break
    if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "lsz":
        word = word[:-1]
    return word[:-1] if len(word) > 3 and word.endswith("e") else word


_WORDS = re.compile(r"[A-Za-z][A-Za-z0-9]*|[0-9]{2,}|[^\W\d_a-zA-Z]+")
_HUMPS = re.compile(r"[A-Z]+(?![a-z])[0-9]*|[A-Z]?[a-z][a-z0-9]*|[A-Z][a-z0-9]+|[0-9]+|[^\W\d_a-zA-Z]+")
_ENDINGS = (  # ending, what comes instead, how many letters must be left
    ("sses", "ss", 2),
    ("ies", "y", 3),
    ("ings", "", 3),
    ("ing", "", 3),
    ("ied", "y", 3),
    ("ed", "", 3),
    ("ers", "", 4),
    ("er", "", 4),
    ("ors", "", 4),
    ("or", "", 4),
    ("ss", "ss", 1),
    ("us", "us", 1),
    ("is", "is", 1),
    ("s", "", 3),
)
_PARTS: dict[str, tuple[str, ...]] = {}


def _parts(identifier: str) -> tuple[str, ...]:
    known = _PARTS.get(identifier)
    if known is None:
        if len(_PARTS) >= _WORDS_KNOWN_MAX:
            _PARTS.clear()
        lower = (one.lower() for one in _HUMPS.findall(identifier))
        kept = (one for one in lower if len(one) > 1 and one not in STOP_WORDS)
        known = _PARTS[identifier] = tuple(map(stem, kept))
    return known


def _amounts(document: Document) -> dict[str, float]:
    """How much of each word a document is: its name and first sentence more than the rest of its text."""
    counts = Counter(words(document.text))
    amounts = {word: TEXT_WEIGHT * min(1.0 + log(count), _REPEATS_MAX) for word, count in counts.items()}
    summary = document.text.partition("\n\n")[0][:_SUMMARY_CHARACTERS_MAX]
    for text, weight in (
        (summary, SUMMARY_WEIGHT),
        (document.module, MODULE_WEIGHT),
        (document.name, NAME_WEIGHT),
        (" ".join(document.extra), EXTRA_WEIGHT),
    ):
        for word in set(words(text)):
            amounts[word] = amounts.get(word, 0.0) + weight
    return amounts


def _rarity(documents: int, count: int) -> float:
    return log((1 + documents) / (1 + count)) ** RARITY_POWER if documents else 1.0


def _place(word: str) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    drawn = blake2b(word.encode(), digest_size=POSITIONS + 1).digest()
    places = np.array([quarter * _QUARTER + drawn[quarter] for quarter in range(POSITIONS)], np.intp)
    signs = np.array([1.0 if drawn[POSITIONS] >> quarter & 1 else -1.0 for quarter in range(POSITIONS)])
    return places, signs
