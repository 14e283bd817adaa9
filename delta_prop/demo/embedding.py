"""Embeds a document as a vector of 1,024 numbers, by rules, without a download.

Every word has fixed positions in the vector, so a small edit of the text is a small change of the vector:
therefore vectors are not normalized, and the search, not the embedding, corrects for the text's length.
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
"""Positions of a word, one in each quarter of the vector, so that no two coincide."""

TEXT_WEIGHT = 0.5
SUMMARY_WEIGHT = 1.5
MODULE_WEIGHT = 1.0
NAME_WEIGHT = 1.5
EXTRA_WEIGHT = 0.5
"""Weight of one word in each part of a document; a word in several parts adds them up."""

RARITY_POWER = 0.75
"""Exponent below 1, so that two matching words of a query outweigh one rare word."""

PRIVATE_FACTOR = 0.5
DEPTH_FACTOR = 0.9
"""Factors for private names and deeply nested modules, which are seldom searched for."""

_SUMMARY_CHARACTERS_MAX = 300
_COUNT_WEIGHT_MAX = 3.0
_CACHED_WORDS_MAX = 1_000_000
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
    """The rules and the weights of words; `learn` freezes them from the first documents.

    They are frozen because a weight that changed with each new document would change every vector.
    """

    def __init__(self) -> None:
        self._weights: dict[str, float] = {}
        self._rarest_weight = 1.0
        self._cached_positions: dict[str, tuple[NDArray[np.intp], NDArray[np.float64]]] = {}

    def learn(self, documents: Iterable[Document]) -> None:
        """Count the documents of each word: a rarer word weighs more."""
        counts: Counter[str] = Counter()
        number = 0
        for document in documents:
            number += 1
            counts.update(set(_word_weights(document)))
        self._weights = {word: _compute_rarity(number, count) for word, count in counts.items()}
        self._rarest_weight = _compute_rarity(number, 0)

    def document(self, document: Document) -> NDArray[np.float32]:
        """Return the vector of a document."""
        factor = DEPTH_FACTOR ** document.module.count(".") * (PRIVATE_FACTOR if document.is_private else 1.0)
        return self._sum(_word_weights(document)) * np.float32(factor)

    def query(self, text: str) -> NDArray[np.float32]:
        """Return the vector of a query."""
        return self._sum(Counter(split_words(text)))

    def _sum(self, amounts: Mapping[str, float]) -> NDArray[np.float32]:
        # Words are added in order, so that rounding does not depend on the rest of the text.
        chosen = sorted(amounts)
        if not chosen:
            return np.zeros(DIMENSION, np.float32)
        positions, signs = zip(*map(self._cached_positions_of, chosen), strict=True)
        weights = [amounts[word] * self._weights.get(word, self._rarest_weight) for word in chosen]
        scaled = np.concatenate(signs) * np.repeat(weights, POSITIONS)
        return np.bincount(np.concatenate(positions), scaled, DIMENSION).astype(np.float32)

    def _cached_positions_of(self, word: str) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        known = self._cached_positions.get(word)
        if known is None:
            if len(self._cached_positions) >= _CACHED_WORDS_MAX:
                self._cached_positions.clear()
            known = self._cached_positions[word] = _positions_of(word)
        return known


def split_words(text: str) -> list[str]:
    """Split a text into its words: identifiers at underscores and humps, without stop words and endings."""
    return [word for one in _WORDS.findall(text) for word in _split_identifier(one)]


def stem(word: str) -> str:
    """Remove a word's grammatical ending; the result is not always a word."""
    for ending, replacement, left_min in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= left_min:
            word = word[: len(word) - len(ending)] + replacement
            break
    if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "lsz":
        word = word[:-1]
    return word[:-1] if len(word) > 3 and word.endswith("e") else word


_WORDS = re.compile(r"[A-Za-z][A-Za-z0-9]*|[0-9]{2,}|[^\W\d_a-zA-Z]+")
_HUMPS = re.compile(r"[A-Z]+(?![a-z])[0-9]*|[A-Z]?[a-z][a-z0-9]*|[A-Z][a-z0-9]+|[0-9]+|[^\W\d_a-zA-Z]+")
_ENDINGS = (  # ending, its replacement, minimum letters left
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
_CACHED_PARTS: dict[str, tuple[str, ...]] = {}


def _split_identifier(identifier: str) -> tuple[str, ...]:
    known = _CACHED_PARTS.get(identifier)
    if known is None:
        if len(_CACHED_PARTS) >= _CACHED_WORDS_MAX:
            _CACHED_PARTS.clear()
        lower = (one.lower() for one in _HUMPS.findall(identifier))
        words = (one for one in lower if len(one) > 1 and one not in STOP_WORDS)
        known = _CACHED_PARTS[identifier] = tuple(map(stem, words))
    return known


def _word_weights(document: Document) -> dict[str, float]:
    """Return the weight of each word: more in the name and first sentence than in the rest of the text."""
    counts = Counter(split_words(document.text))
    amounts = {word: TEXT_WEIGHT * min(1.0 + log(count), _COUNT_WEIGHT_MAX) for word, count in counts.items()}
    summary = document.text.partition("\n\n")[0][:_SUMMARY_CHARACTERS_MAX]
    for text, weight in (
        (summary, SUMMARY_WEIGHT),
        (document.module, MODULE_WEIGHT),
        (document.name, NAME_WEIGHT),
        (" ".join(document.extra), EXTRA_WEIGHT),
    ):
        for word in set(split_words(text)):
            amounts[word] = amounts.get(word, 0.0) + weight
    return amounts


def _compute_rarity(documents: int, count: int) -> float:
    return log((1 + documents) / (1 + count)) ** RARITY_POWER if documents else 1.0


def _positions_of(word: str) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    drawn = blake2b(word.encode(), digest_size=POSITIONS + 1).digest()
    positions = np.array([quarter * _QUARTER + drawn[quarter] for quarter in range(POSITIONS)], np.intp)
    signs = np.array([1.0 if drawn[POSITIONS] >> quarter & 1 else -1.0 for quarter in range(POSITIONS)])
    return positions, signs
