"""Search in the demo: ten fixed searches, and the index against an exact numpy search."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import anyio
import numpy as np
import pytest

from delta_prop import Propagator
from delta_prop.demo import system
from delta_prop.demo.corpus import ParseFailed
from delta_prop.demo.library import NAMESPACE, Library
from delta_prop.demo.scenes import HITS_MAX, SEARCHES
from delta_prop_sinks.index import IndexSink

if TYPE_CHECKING:
    from numpy.typing import NDArray

SENTENCE_COUNT = 500


class Corpus:
    """The embedded standard library, with exact scores computed by numpy."""

    def __init__(self) -> None:
        self.library = Library()
        root = system.find_standard_library()
        for path in system.scan(root, system.LIBRARY_FILTER):
            text = system.read(root, path)
            try:
                self.library.add(path, text or "")
            except ParseFailed:
                continue
        self.library.learn()
        self.ids = list(self.library.documents)
        self.matrix = self.library.vectors(self.ids)

    def scores(self, queries: NDArray[np.float32], rows: slice) -> NDArray[np.float64]:
        """Return a row of scores for each query."""
        matrix = self.matrix[rows].astype(np.float64)
        norms = np.linalg.norm(matrix, axis=1)
        scores: NDArray[np.float64] = queries.astype(np.float64) @ matrix.T
        return scores / (0.5 * np.median(norms) + 0.5 * norms)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus()


def test_ten_searches_find_the_expected_documents(corpus: Corpus) -> None:
    queries = np.stack([corpus.library.embedding.query(query) for query, _ in SEARCHES])
    best = np.argsort(-corpus.scores(queries, slice(None)), axis=1)[:, :HITS_MAX]
    found_count = 0
    for (query, expected), row in zip(SEARCHES, best.tolist(), strict=True):
        hits = [corpus.ids[index] for index in row]
        found_count += any(hit in expected for hit in hits)
        print(f"{query}: {', '.join(hits)}")
    print(f"{found_count} of {len(SEARCHES)} in the top {HITS_MAX}, among {len(corpus.ids)} documents")
    assert len(SEARCHES) == 10
    assert found_count >= 9


def test_index_recall_against_exact_search(corpus: Corpus, full: bool) -> None:
    rows = slice(None, None, 1 if full else 3)
    sentences = sample_sentences(corpus.library)
    queries = np.stack([corpus.library.embedding.query(text) for text in sentences])
    exact = corpus.scores(queries, rows)
    ids = corpus.ids[rows]
    index_of = {vector_id: index for index, vector_id in enumerate(ids)}

    async def main() -> list[list[str]]:
        async with Propagator() as propagator:
            index = await propagator.attach(IndexSink())
            for start in range(0, len(ids), 512):
                chunk = ids[start : start + 512]
                await propagator.publish_many(
                    chunk, corpus.matrix[rows][start : start + 512], namespace=NAMESPACE
                )
            await propagator.wait_visible(len(ids))
            return [
                [hit.vector_id for hit in index.search(query, HITS_MAX, NAMESPACE, "pivot")]
                for query in queries
            ]

    correct = 0
    for scores, hits in zip(exact, anyio.run(main), strict=True):
        threshold = np.sort(scores)[-HITS_MAX]  # equal documents tie, so each of them is correct
        correct += sum(scores[index_of[hit]] >= threshold - 1e-9 for hit in hits)
    recall = correct / (HITS_MAX * len(sentences))
    print(f"recall@{HITS_MAX} {recall:.4f}: {len(sentences)} sentences, {len(ids)} documents")
    assert len(sentences) == SENTENCE_COUNT
    assert recall >= 0.98


def sample_sentences(library: Library) -> list[str]:
    """Return sentences of five words or more, spread over all documents."""
    texts = (" ".join(document.text.split()) for document in library.documents.values())
    sentences = [
        part for text in texts for part in re.split(r"(?<=[.!?]) ", text) if 5 <= len(part.split()) <= 40
    ]
    return sentences[:: len(sentences) // SENTENCE_COUNT][:SENTENCE_COUNT]
