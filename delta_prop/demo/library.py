"""The documents and their vectors as the demo last published them, and the deltas of an edit.

This module returns deltas; it publishes nothing, and reads no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from delta_prop.demo.corpus import Document, documents_of
from delta_prop.demo.embedding import DIMENSION, Embedding
from delta_prop_wire.delta import Delta, Operation, create, delete, dense, sparse, sparse_add

if TYPE_CHECKING:
    from numpy.typing import NDArray

NAMESPACE = "docs"
DOCUMENTS_MAX = 20_000
_SPARSE_MAX = DIMENSION // 4
"""Maximum number of values in a sparse delta: with more values and indices, a dense delta is smaller."""


class Library:
    """The documents of each file, and each document's vector; up to 20,000 documents."""

    def __init__(self) -> None:
        self.embedding = Embedding()
        self.documents: dict[str, Document] = {}
        self.skipped_count = 0
        self._ids: dict[str, list[str]] = {}
        self._vectors: dict[str, NDArray[np.float32]] = {}
        self._links: dict[str, list[str]] = {}

    def add(self, path: str, text: str) -> int:
        """Add a file's documents, up to the bound; return the number added. Raises ParseFailed."""
        return len(self._add_documents(path, documents_of(path, text)))

    def learn(self) -> None:
        """Set the weights of words from all documents so far. Call this once, before the first vector."""
        self.embedding.learn(self.documents.values())

    def vectors(self, ids: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors of documents, one row for each; they count as published from now on."""
        matrix = np.stack([self._embed(self.documents[document_id]) for document_id in ids])
        self._vectors.update(zip(ids, matrix, strict=True))
        return matrix

    def file_of(self, document_id: str) -> str:
        """Return the path of the file that a document is in."""
        return next(path for path, ids in self._ids.items() if document_id in ids)

    def edit(self, path: str, text: str | None) -> list[Delta]:
        """Return the deltas of a file's new text (None: the file was removed). Raises ParseFailed."""
        documents = [] if text is None else documents_of(path, text)
        old_vectors = {document_id: self._vectors[document_id] for document_id in self._ids.get(path, ())}
        old_documents = {document_id: self.documents.pop(document_id) for document_id in old_vectors}
        deltas = []
        for document in self._add_documents(path, documents):
            if old_documents.get(document.id) != document:
                vector = self._embed(document)
                operation = smallest_change(old_vectors.get(document.id), vector)
                if operation is not None:
                    deltas.append(Delta(document.id, operation, NAMESPACE))
                self._vectors[document.id] = vector
        for document_id in old_vectors:
            if document_id not in self.documents:
                del self._vectors[document_id]
                self._links.pop(document_id, None)
                deltas.append(Delta(document_id, delete(), NAMESPACE))
        return deltas

    def link(self, document_id: str, other_id: str) -> Delta | None:
        """Make a document say "see also" another one, as a delta that adds; return None if nothing changes.

        The link is not part of the file, and remains when the file is edited.
        """
        before = self._vectors[document_id]
        self._links.setdefault(document_id, []).append(other_id)
        difference = self._embed(self.documents[document_id]) - before
        indices = np.flatnonzero(difference)
        if not len(indices):
            return None
        # The published state is this sum, which may differ from the embedding by rounding.
        self._vectors[document_id] = before + difference
        return Delta(document_id, sparse_add(indices, difference[indices]), NAMESPACE)

    def _embed(self, document: Document) -> NDArray[np.float32]:
        links = self._links.get(document.id)
        if links:
            document = replace(document, text=f"{document.text}\n\nsee also {', '.join(links)}")
        return self.embedding.document(document)

    def _add_documents(self, path: str, documents: Sequence[Document]) -> list[Document]:
        added = []
        for document in documents:
            if len(self.documents) >= DOCUMENTS_MAX:
                self.skipped_count += 1
            elif document.id not in self.documents:  # else another file has that id: the first file wins
                self.documents[document.id] = document
                added.append(document)
        self._ids[path] = [document.id for document in added]
        return added


def smallest_change(before: NDArray[np.float32] | None, after: NDArray[np.float32]) -> Operation | None:
    """Return the smallest operation that changes `before` to `after`; None if they are equal."""
    if before is None:
        return create(after)
    indices = np.flatnonzero(before != after)
    if not len(indices):
        return None
    return sparse(indices, after[indices]) if len(indices) <= _SPARSE_MAX else dense(after)


def append_words(text: str, document: Document, words: str) -> str:
    """Add `words` to the end of a document in a file's text.

    Return the text unchanged if the document's last line is not found below its first one.
    """
    lines = text.splitlines(keepends=True)
    last = document.text.rstrip().rpartition("\n")[2].strip()
    for number in range(document.line - 1, len(lines)):
        if last and last in lines[number]:
            prefix, _, suffix = lines[number].partition(last)
            lines[number] = f"{prefix}{last} {words}{suffix}"
            return "".join(lines)
    return text
