"""A service with a storage and an index sink, and a hundred differences to plant in each sink."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from delta_prop.client import SyncProducer
from delta_prop_sinks import IndexSink, ResidentVectors, StorageSink
from delta_prop_sinks.vector_table import put
from delta_prop_wire.delta import Delta, create, delete, opaque, sparse

if TYPE_CHECKING:
    from pathlib import Path

    from delta_prop_wire.algebra import VectorState
    from tests.delta_prop.client.threaded_service import Served

DOCUMENTS = 200
KINDS = ("missing", "stale", "extra", "corrupted")
"""Kinds of the planted differences."""


def document_id(number: int) -> str:
    return f"doc-{number:03}"


class Service:
    """A service with a storage and an index sink.

    `states_before`, `stored_before`: by vector id, the states of the index and the rows of the storage file
    halfway through the deltas; a fault makes a vector stale by writing one of these back.
    """

    def __init__(self, running: Served, path: Path) -> None:
        self.running = running
        self.file = path / "vectors.db"
        self.storage = StorageSink(self.file, flush_s=0.01)
        self.index = IndexSink(resident=ResidentVectors())
        for sink in (self.storage, self.index):
            self.call(partial(running.propagator.attach, sink))
        with SyncProducer(running.address, name="documents") as p:
            numbers = np.random.default_rng(7).normal(size=(DOCUMENTS, 8)).astype(np.float32)
            for number in range(DOCUMENTS):
                p.offer(
                    Delta(document_id(number), create(numbers[number]), "docs", metadata={"page": number})
                )
            p.publish(Delta("row", opaque(b"bytes"), "rows"))
            self.settle()
            self.states_before = {row[1]: row[2] for row in self.rows()}
            self.stored_before = self.select("SELECT * FROM vectors")
            for number in range(0, DOCUMENTS, 2):
                p.offer(Delta(document_id(number), sparse([number % 8], [number]), "docs"))
            p.publish(*(Delta(document_id(number), delete(), "docs") for number in range(180, DOCUMENTS)))
        self.settle()

    def call(self, function: Any) -> Any:
        return self.running.call(function)

    def settle(self) -> None:
        """Wait until both sinks have stored all deltas."""
        propagator = self.running.propagator

        async def wait() -> None:
            last = propagator.internals().partition.log.high_watermark - 1
            await propagator.wait_visible(last, committed=True, timeout_s=20)

        self.call(wait)

    def rows(self) -> list[tuple[str, str, VectorState]]:
        return self.call(lambda: list(self.index.rows()))

    def select(self, statement: str) -> dict[str, tuple[Any, ...]]:
        with closing(sqlite3.connect(self.file)) as connection:
            return {row[1]: row for row in connection.execute(statement)}


def planted_faults() -> dict[str, str]:
    """Return faults by vector id: 25 of each kind."""
    faults = {document_id(number): "missing" for number in range(25)}
    faults |= {document_id(number): "stale" for number in range(30, 80, 2)}
    faults |= {f"never-{number}": "extra" for number in range(13)} | {
        document_id(number): "extra" for number in range(180, 192)
    }
    return faults | {document_id(number): "corrupted" for number in range(100, 125)}


def corrupt_file(service: Service) -> None:
    """Change rows of the storage file without the service."""
    placeholders = ", ".join("?" * 13)
    insert = f"INSERT OR REPLACE INTO vectors VALUES ({placeholders})"
    with closing(sqlite3.connect(service.file, timeout=60)) as connection, connection:
        for name, kind in planted_faults().items():
            row = list(service.stored_before.get(name, service.stored_before[document_id(1)]))
            if kind == "missing":
                connection.execute("DELETE FROM vectors WHERE vector_id = ?", [name])
            elif kind in ("stale", "extra"):
                row[1] = name
                connection.execute(insert, row)
            elif name.endswith("0"):
                connection.execute("UPDATE vectors SET metadata = '{}' WHERE vector_id = ?", [name])
            else:
                corrupted = bytes([row[5][0] ^ 1, *row[5][1:]])
                connection.execute("UPDATE vectors SET value = ? WHERE vector_id = ?", [corrupted, name])


def corrupt_index(service: Service) -> None:
    table = service.index.resident.tables["docs"]
    for name, kind in planted_faults().items():
        if kind == "missing":
            table.release(table.slots[name])
        elif kind in ("stale", "extra"):
            state = service.states_before.get(name, service.states_before[document_id(1)])
            put(table, name, state, offset=3)
        elif name.endswith("0"):
            table.metadata[table.slots[name]] = {"page": -1}
        else:
            assert table.matrix is not None
            table.matrix[table.slots[name]][5] += 1
