"""A sink with its own state: a table of products in SQLite. Its rows and its cursor commit together.

Other programs read the table `products`. The sink also stores each vector's state, from which it applies the
next delta. A forwarded delta may sort before one that is applied already; then the sink refolds the vector:
it computes the state again, from all deltas in their order.

python examples/table_sink.py
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import msgpack
import numpy as np

from delta_prop import Delta, Kind, Propagator, create, delete, metadata_only
from delta_prop.sinks import (
    Cursor,
    RejectDelta,
    ResumePoint,
    StopSink,
    TryAgain,
    VectorState,
    check_sink,
    fold,
    fold_again,
    must_fold_again,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from delta_prop.sinks import Delivery, SinkContext, StateRow

    Ref = tuple[str, str]  # namespace and vector id

T = TypeVar("T")

TABLES = """
CREATE TABLE IF NOT EXISTS products (
    namespace TEXT, vector_id TEXT, alive INTEGER, name TEXT, price REAL, state BLOB,
    PRIMARY KEY (namespace, vector_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS cursor (
    one INTEGER PRIMARY KEY CHECK (one = 1), cursor TEXT, lamport INTEGER, rebuilding INTEGER
);
"""
KNOWN_KINDS = frozenset(map(int, Kind))


@dataclass(frozen=True)
class TableStatistics:
    """A frozen snapshot of the sink's numbers. `refolded`: how often a vector was refolded."""

    next_offset: int
    refolded: int


class ProductTable:
    """Stores each vector's name and price, from the metadata, in a file that is exact after any failure."""

    name = "products"

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self._context: SinkContext
        self._next_offset = self._lamport = self._refolded = 0

    # --- the contract

    async def open(self, context: SinkContext) -> ResumePoint:
        """Return the file's cursor; create the file if it does not exist."""
        self._context = context
        try:
            stored, self._lamport, rebuilding = await context.threads.run(self._read_cursor)
        except (sqlite3.Error, OSError) as error:
            raise StopSink(f"{self.path} cannot be opened ({error}): repair or remove it") from error
        cursor = Cursor(context.log_id, context.epoch, 0) if stored is None else Cursor.parse(stored)
        self._next_offset = cursor.next_offset
        return ResumePoint(cursor, self._lamport, bool(rebuilding))

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Apply all rows, or those before a rejected row, in one transaction."""
        states = await self._on_thread(partial(self._read_states, vectors_of(deliveries)))
        refolds: dict[Ref, int] = {}
        next_offset, lamport = self._next_offset, self._lamport
        rejected = None
        for delivery in deliveries:
            rejected = fold_rows(delivery, states, refolds)
            if not delivery.redelivered:  # rows from quarantine move no cursor
                end = delivery.next_offset if rejected is None else rejected.offset
                next_offset = max(next_offset, end)
            lamport = max(lamport, delivery.logged.lamport + delivery.logged.count - 1)
            if rejected is not None:
                break
        states |= await fold_again(self._context, refolds)  # reads the log once for all vectors
        await self._on_thread(partial(self._write_with_cursor, states, next_offset, lamport))
        self._next_offset, self._lamport = next_offset, lamport
        self._refolded += len(refolds)
        self._context.committed(next_offset)
        if rejected is not None:
            raise rejected

    async def aclose(self) -> None:
        """Do nothing: each transaction has its own connection."""

    def statistics(self) -> TableStatistics:
        return TableStatistics(self._next_offset, self._refolded)

    # --- optional: a reader of states, which the conformance kit compares with its own fold

    async def get(self, namespace: str, vector_id: str) -> VectorState | None:
        states = await self._on_thread(partial(self._read_states, [(namespace, vector_id)]))
        return states.get((namespace, vector_id))

    # --- optional: rebuilt from a snapshot, if the log no longer has the next offset

    async def begin_rebuild(self, offset: int) -> None:
        await self._on_thread(self._begin_rebuild)

    async def load_states(self, rows: Sequence[StateRow]) -> None:
        await self._on_thread(
            partial(self._write_states, {(row.namespace, row.vector_id): row.state for row in rows})
        )

    async def end_rebuild(self, offset: int, lamport: int) -> None:
        await self._on_thread(partial(self._write_with_cursor, {}, offset, lamport))
        self._next_offset, self._lamport = offset, lamport
        self._context.committed(offset)

    # --- on the sink's thread, one call at a time

    async def _on_thread(self, function: Callable[[], T]) -> T:
        try:
            return await self._context.threads.run(function)
        except (sqlite3.Error, OSError) as error:  # the file is locked or the disk full: nothing was written
            raise TryAgain(f"{self.path}: {error}") from error

    def _read_cursor(self) -> tuple[str | None, int, int]:
        with closing(sqlite3.connect(self.path)) as db, db:
            db.executescript(TABLES)
            row = db.execute("SELECT cursor, lamport, rebuilding FROM cursor").fetchone()
            return (None, 0, 0) if row is None else row

    def _read_states(self, refs: Collection[Ref]) -> dict[Ref, VectorState]:
        query = "SELECT state FROM products WHERE namespace = ? AND vector_id = ?"
        with closing(sqlite3.connect(self.path)) as db:
            rows = {ref: db.execute(query, ref).fetchone() for ref in refs}
        return {ref: unpack(row[0]) for ref, row in rows.items() if row is not None}

    def _write_with_cursor(self, states: dict[Ref, VectorState], next_offset: int, lamport: int) -> None:
        cursor = Cursor(self._context.log_id, self._context.epoch, next_offset)
        # One transaction: all rows and the cursor are written, or nothing.
        with closing(sqlite3.connect(self.path)) as db, db:
            db.executemany("REPLACE INTO products VALUES (?, ?, ?, ?, ?, ?)", map(encode_row, states.items()))
            db.execute("REPLACE INTO cursor VALUES (1, ?, ?, 0)", (str(cursor), lamport))

    def _write_states(self, states: dict[Ref, VectorState]) -> None:
        with closing(sqlite3.connect(self.path)) as db, db:
            db.executemany("REPLACE INTO products VALUES (?, ?, ?, ?, ?, ?)", map(encode_row, states.items()))

    def _begin_rebuild(self) -> None:
        cursor = Cursor(self._context.log_id, self._context.epoch, 0)
        with closing(sqlite3.connect(self.path)) as db, db:
            db.execute("DELETE FROM products")
            db.execute("REPLACE INTO cursor VALUES (1, ?, 0, 1)", (str(cursor),))


def rows_of(delivery: Delivery) -> Sequence[int]:
    """Return the rows that match the sink's topics; the batch may have other rows."""
    return range(delivery.batch.count) if delivery.rows is None else delivery.rows.tolist()


def vectors_of(deliveries: Sequence[Delivery]) -> set[Ref]:
    """Return the vectors that the deliveries change."""
    return {
        (delivery.batch.namespaces[row], delivery.batch.keys[row])
        for delivery in deliveries
        for row in rows_of(delivery)
    }


def fold_rows(
    delivery: Delivery, states: dict[Ref, VectorState], refolds: dict[Ref, int]
) -> RejectDelta | None:
    """Fold rows onto the states, and note the vectors to refold. Return the rejection of an invalid row."""
    logged, batch = delivery.logged, delivery.batch
    for row in rows_of(delivery):
        ref, key = (batch.namespaces[row], batch.keys[row]), logged.key(row)
        state = states.get(ref, VectorState())
        if (reason := find_error(delivery, row)) is not None:
            return RejectDelta(logged.offset + row, reason)
        if ref in refolds or must_fold_again(logged, row, state.key):
            refolds[ref] = logged.offset + row  # a forwarded row that cannot be applied on top
        elif state.key is None or key > state.key:  # else the row is a duplicate after a failure
            states[ref] = fold([(key, batch.operation(row), batch.metadata(row))], onto=state)
    return None


def find_error(delivery: Delivery, row: int) -> str | None:
    """Return the reason why a row can never be in this table; None if it can."""
    kind, price = delivery.batch.kinds[row], (delivery.batch.metadata(row) or {}).get("price")
    if kind not in KNOWN_KINDS:
        return f"kind {kind} is of a later version"
    if price is not None and not is_number(price):
        return f"price {price!r:.80} is not a number"
    return None


def is_number(value: object) -> bool:
    return isinstance(value, (int, float))


def encode_row(item: tuple[Ref, VectorState]) -> tuple[Any, ...]:
    """Return a row of the table. A deleted vector stays as a tombstone, to detect duplicates of its rows."""
    (namespace, vector_id), state = item
    name, price = str(state.metadata.get("name", "")), state.metadata.get("price")
    return (namespace, vector_id, state.alive, name, price if is_number(price) else None, pack(state))


def pack(state: VectorState) -> bytes:
    """Return the full state as bytes; the next delta is applied to it."""
    vector = None if state.vector is None else state.vector.tobytes()
    return msgpack.packb((state.alive, vector, state.data, state.metadata, state.ignored, state.key))


def unpack(data: bytes) -> VectorState:
    """Return the state that `pack` encoded."""
    alive, vector, opaque, metadata, ignored, key = msgpack.unpackb(data)
    numbers = None if vector is None else np.frombuffer(vector, np.float32)
    return VectorState(alive, numbers, opaque, metadata, ignored, tuple(key))


async def main() -> None:
    with TemporaryDirectory() as folder:
        await check_sink(partial(ProductTable, Path(folder, "check.db")))
        print("the sink follows the contract")

        file = Path(folder, "products.db")
        async with Propagator() as p:
            await p.attach(ProductTable(file), topics=["ns:shop"])
            await p.publish(
                Delta("pen", create([1.0]), namespace="shop", metadata={"name": "Pen", "price": 2}),
                Delta("ink", create([2.0]), namespace="shop", metadata={"name": "Ink", "price": 9}),
                Delta("cap", create([3.0]), namespace="shop", metadata={"name": "Cap", "price": "dear"}),
                Delta("pen", metadata_only(), namespace="shop", metadata={"price": 3}),
            )
            last = await p.publish(Delta("ink", delete(), namespace="shop"))
            await p.wait_visible(last)
            for held in p.quarantine("products"):
                print(f"quarantined: {held.delta.vector_id}, {held.reason}")
        with closing(sqlite3.connect(file)) as db:
            print(db.execute("SELECT name, price FROM products WHERE alive").fetchall())


if __name__ == "__main__":
    anyio.run(main)
