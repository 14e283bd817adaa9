"""The embedding: equal on every machine; a small edit of a text changes few numbers."""

from __future__ import annotations

import numpy as np
import pytest

from delta_prop.demo.corpus import Document
from delta_prop.demo.embedding import (
    DEPTH_FACTOR,
    DIMENSION,
    POSITIONS,
    PRIVATE_FACTOR,
    Embedding,
    split_words,
    stem,
)


def document(text: str, name: str = "name", module: str = "module") -> Document:
    return Document(f"{module}:{name}", module, name, f"def {name}()", text)


def trained_embedding() -> Embedding:
    embedding = Embedding()
    embedding.learn(document(f"common word number {number}", f"n{number}") for number in range(50))
    return embedding


def test_words_are_split_and_stemmed_without_stop_words() -> None:
    assert split_words("The HTTPServer's parse_args, encodebytes and lru_cache of b64encode") == [
        "http", "serv", "pars", "arg", "encodebyt", "lru", "cach", "b64encod",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "family",
    [
        ("parse", "parses", "parsed", "parsing", "parser"),
        ("quote", "quotes", "quoted", "quoting"),
        ("directory", "directories"),
        ("compress", "compressed", "compressing"),
        ("run", "running", "runs"),
        ("class", "classes"),
    ],
)
def test_word_forms_share_a_stem(family: tuple[str, ...]) -> None:
    assert len({stem(word) for word in family}) == 1


def test_word_positions_are_the_same_on_every_machine() -> None:
    vector = Embedding().query("sample")
    positions = vector.nonzero()[0].tolist()
    assert positions == [218, 401, 513, 940]
    assert vector[positions].tolist() == [1.0, 1.0, 1.0, 1.0]


def test_two_new_words_change_exactly_eight_numbers() -> None:
    embedding = trained_embedding()
    text = "First sentence.\n\nA longer explanation with a number of other words in it, and more."
    before, after = embedding.document(document(text)), embedding.document(document(text + " lottery raffle"))
    assert before.dtype == np.float32
    assert before.shape == (DIMENSION,)
    assert len(np.flatnonzero(before != after)) == 2 * POSITIONS


def test_weights_stay_fixed_after_learning() -> None:
    embedding = trained_embedding()
    before = embedding.query("common lottery")
    embedding.document(document("lottery " * 9))
    assert np.array_equal(before, embedding.query("common lottery"))


def test_rare_words_names_and_summaries_weigh_more() -> None:
    embedding = trained_embedding()

    def weight(text: str, word: str, name: str = "other") -> float:
        return float(np.abs(embedding.document(document(text, name)) * (embedding.query(word) != 0)).sum())

    assert weight("lottery", "lottery") > weight("common", "common")
    assert weight("lottery", "lottery", "lottery") > weight("lottery", "lottery")
    assert weight("lottery\n\nbody", "lottery") > weight("body\n\nlottery", "lottery")


def test_private_and_deep_names_weigh_less() -> None:
    embedding = trained_embedding()
    norms = [
        float(np.linalg.norm(embedding.document(document("text", name, module))))
        for name, module in (("name", "module"), ("name", "a.module"), ("_name", "module"))
    ]
    assert norms[1] == pytest.approx(DEPTH_FACTOR * norms[0])
    assert norms[2] == pytest.approx(PRIVATE_FACTOR * norms[0])


def test_text_without_words_is_a_zero_vector() -> None:
    assert not Embedding().query("the of, and ...").any()
