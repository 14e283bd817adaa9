"""The documents and their vectors as the demo last published them, and what an edit changes of them.

Deltas come out; nothing is published here, and no file is read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from delta_prop.demo.corpus import documents_of
from delta_prop.demo.embedding import DIMENSION, Embedding
from delta_prop_wire.delta import Delta, create, delete, dense, sparse, sparse_add

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from delta_prop.demo.corpus import Document
    from delta_prop_wire.delta import Operation

NAMESPACE = "docs"
DOCUMENTS_MAX = 20_000
_SPARSE_MAX = DIMENSION // 4
"""A sparse delta has an index for each value: before half of the numbers change, a dense one is smaller."""


class Library:
    """Which documents each file holds, and each document's vector. Bounded: 20,000 documents."""

    def __init__(self) -> None:
        self.embedding = Embedding()
        self.documents: dict[str, Document] = {}
        self.left_out = 0
        self._ids: dict[str, list[str]] = {}
        self._vectors: dict[str, NDArray[np.float32]] = {}
        self._links: dict[str, list[str]] = {}

    def add(self, path: str, text: str) -> int:
        """Take a file's documents in, as many as there is room for; how many those were. Raises NotParsed."""
        return len(self._take(path, documents_of(path, text)))

    def learn(self) -> None:
        """Freeze the weights of words from all documents so far. Call it once, before any vector is made."""
        self.embedding.learn(self.documents.values())

    def vectors(self, ids: Sequence[str]) -> NDArray[np.float32]:
        """The vectors of documents, a row each; they count as published from now on."""
        matrix = np.stack([self._embed(self.documents[one]) for one in ids])
        self._vectors.update(zip(ids, matrix, strict=True))
        return matrix

    def file_of(self, document_id: str) -> str:
        """The path of the file that a document is in."""
        return next(path for path, ids in self._ids.items() if document_id in ids)

    def edit(self, path: str, text: str | None) -> list[Delta]:
        """What a file's new text (None: the file is gone) changes, as deltas. Raises NotParsed."""
        found = [] if text is None else documents_of(path, text)
        before = {one: self._vectors[one] for one in self._ids.get(path, ())}
        old = {one: self.documents.pop(one) for one in before}
        deltas = []
        for document in self._take(path, found):
            if old.get(document.id) != document:
                vector = self._embed(document)
                operation = change(before.get(document.id), vector)
                if operation is not None:
                    deltas.append(Delta(document.id, operation, NAMESPACE))
                self._vectors[document.id] = vector
        for gone in before:
            if gone not in self.documents:
                del self._vectors[gone]
                self._links.pop(gone, None)
                deltas.append(Delta(gone, delete(), NAMESPACE))
        return deltas

    def link(self, document_id: str, other_id: str) -> Delta | None:
        """Let a document say "see also" another one, as a delta that adds; None where that changes nothing.

        The link is no part of the file, and stays when that is edited.
        """
        before = self._vectors[document_id]
        self._links.setdefault(document_id, []).append(other_id)
        difference = self._embed(self.documents[document_id]) - before
        places = np.flatnonzero(difference)
        if not len(places):
            return None
        # What is published is the sum, which may be off the embedding by its rounding.
        self._vectors[document_id] = before + difference
        return Delta(document_id, sparse_add(places, difference[places]), NAMESPACE)

    def _embed(self, document: Document) -> NDArray[np.float32]:
        links = self._links.get(document.id)
        if links:
            document = replace(document, text=f"{document.text}\n\nsee also {', '.join(links)}")
        return self.embedding.document(document)

    def _take(self, path: str, found: Sequence[Document]) -> list[Document]:
        taken = []
        for document in found:
            if len(self.documents) >= DOCUMENTS_MAX:
                self.left_out += 1
            elif document.id not in self.documents:  # else another file has that id: the first one keeps it
                self.documents[document.id] = document
                taken.append(document)
        self._ids[path] = [one.id for one in taken]
        return taken


def change(before: NDArray[np.float32] | None, after: NDArray[np.float32]) -> Operation | None:
    """The smallest operation that makes one vector the other; None where they are the same."""
    if before is None:
        return create(after)
    places = np.flatnonzero(before != after)
    if not len(places):
        return None
    return sparse(places, after[places]) if len(places) <= _SPARSE_MAX else dense(after)


def edited(text: str, document: Document, words: str) -> str:
    """A file's text with `words` added to the end of what a document says.

    The text as it is where the document's last line is not found below its first one.
    """
    lines = text.splitlines(keepends=True)
    last = document.text.rstrip().rpartition("\n")[2].strip()
    for number in range(document.line - 1, len(lines)):
        if last and last in lines[number]:
            begin, _, end = lines[number].partition(last)
            lines[number] = f"{begin}{last} {words}{end}"
            return "".join(lines)
    return text
