"""Embeds a document as a vector of 1,024 numbers, by rules, without a download.

Every word has fixed positions in the vector, so a small edit of the text makes a small change of the vector.
For this reason vectors are not normalized; the search corrects for the length of texts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from math import log
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from delta_prop.demo.corpus import Document

DIMENSION = 1024
POSITIONS = 4
"""The number of positions of a word: one in each quarter of the vector, so that no two coincide."""

TEXT_WEIGHT = 0.5
SUMMARY_WEIGHT = 1.5
MODULE_WEIGHT = 1.0
NAME_WEIGHT = 1.5
EXTRA_WEIGHT = 0.5
"""Weights of a word, by the part of the document; a word in several parts gets their sum."""

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
    """The weights of words, and the vectors made with them.

    `learn` sets the weights from the first documents; afterwards they stay fixed, since a weight that changed
    with each new document would change every vector.
    """

    def __init__(self) -> None:
        self._rarities: dict[str, float] = {}
        self._highest_rarity = 1.0  # of words that no document has
        self._cached_positions: dict[str, tuple[NDArray[np.intp], NDArray[np.float64]]] = {}

    def learn(self, documents: Iterable[Document]) -> None:
        """Set the weight of each word from the number of documents that have it: a rarer word weighs more."""
        counts: Counter[str] = Counter()
        document_count = 0
        for document in documents:
            document_count += 1
            counts.update(set(_word_weights(document)))
        self._rarities = {word: _compute_rarity(document_count, count) for word, count in counts.items()}
        self._highest_rarity = _compute_rarity(document_count, 0)

    def document(self, document: Document) -> NDArray[np.float32]:
        """Return the vector of a document."""
        factor = DEPTH_FACTOR ** document.module.count(".") * (PRIVATE_FACTOR if document.is_private else 1.0)
        return self._sum(_word_weights(document)) * np.float32(factor)

    def query(self, text: str) -> NDArray[np.float32]:
        """Return the vector of a query."""
        return self._sum(Counter(split_words(text)))

    def _sum(self, amounts: Mapping[str, float]) -> NDArray[np.float32]:
        # Words are added in a fixed order, so that rounding does not depend on the order of the text.
        words = sorted(amounts)
        if not words:
            return np.zeros(DIMENSION, np.float32)
        positions, signs = zip(*map(self._cached_positions_of, words), strict=True)
        weights = [amounts[word] * self._rarities.get(word, self._highest_rarity) for word in words]
        scaled = np.concatenate(signs) * np.repeat(weights, POSITIONS)
        return np.bincount(np.concatenate(positions), scaled, DIMENSION).astype(np.float32)

    def _cached_positions_of(self, word: str) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        cached = self._cached_positions.get(word)
        if cached is None:
            if len(self._cached_positions) >= _CACHED_WORDS_MAX:
                self._cached_positions.clear()
            cached = self._cached_positions[word] = _positions_of(word)
        return cached


def split_words(text: str) -> list[str]:
    """Split a text into words, identifiers at underscores and capitals; drop stop words and endings."""
    return [word for identifier in _WORDS.findall(text) for word in _split_identifier(identifier)]


def stem(word: str) -> str:
    """Remove a word's grammatical ending; the result is not always a word."""
    for ending, replacement, length_min in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= length_min:
            word = word[: len(word) - len(ending)] + replacement
            break
    if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "lsz":
        word = word[:-1]
    return word[:-1] if len(word) > 3 and word.endswith("e") else word


_WORDS = re.compile(r"[A-Za-z][A-Za-z0-9]*|[0-9]{2,}|[^\W\d_a-zA-Z]+")
_HUMPS = re.compile(r"[A-Z]+(?![a-z])[0-9]*|[A-Z]?[a-z][a-z0-9]*|[A-Z][a-z0-9]+|[0-9]+|[^\W\d_a-zA-Z]+")
_ENDINGS = (  # ending, its replacement, minimum number of letters before it
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
    cached = _CACHED_PARTS.get(identifier)
    if cached is None:
        if len(_CACHED_PARTS) >= _CACHED_WORDS_MAX:
            _CACHED_PARTS.clear()
        parts = (part.lower() for part in _HUMPS.findall(identifier))
        words = (part for part in parts if len(part) > 1 and part not in STOP_WORDS)
        cached = _CACHED_PARTS[identifier] = tuple(map(stem, words))
    return cached


def _word_weights(document: Document) -> dict[str, float]:
    """Return the weight of each word: higher in the name and first paragraph than in the rest of the text."""
    counts = Counter(split_words(document.text))
    weights = {word: TEXT_WEIGHT * min(1.0 + log(count), _COUNT_WEIGHT_MAX) for word, count in counts.items()}
    summary = document.text.partition("\n\n")[0][:_SUMMARY_CHARACTERS_MAX]
    for text, weight in (
        (summary, SUMMARY_WEIGHT),
        (document.module, MODULE_WEIGHT),
        (document.name, NAME_WEIGHT),
        (" ".join(document.extra), EXTRA_WEIGHT),
    ):
        for word in set(split_words(text)):
            weights[word] = weights.get(word, 0.0) + weight
    return weights


def _compute_rarity(document_count: int, count: int) -> float:
    """Return the rarity of a word that is in `count` of all documents."""
    return log((1 + document_count) / (1 + count)) ** RARITY_POWER if document_count else 1.0


def _positions_of(word: str) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return the positions of a word in the vector, and the sign of its weight at each."""
    digest = blake2b(word.encode(), digest_size=POSITIONS + 1).digest()
    positions = np.array([quarter * _QUARTER + digest[quarter] for quarter in range(POSITIONS)], np.intp)
    signs = np.array([1.0 if digest[POSITIONS] >> quarter & 1 else -1.0 for quarter in range(POSITIONS)])
    return positions, signs
