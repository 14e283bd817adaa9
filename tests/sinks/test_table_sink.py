"""The table of the page on sinks keeps the contract, and what would be wrong with it is found."""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import anyio
import pytest

from delta_prop.testing import run_virtual
from delta_prop_sinks import ContractViolation, check_sink

EXAMPLE = Path(__file__).parents[2] / "examples" / "table_sink.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example as a module of its own, which a test may spoil."""
    specification = spec_from_file_location("table_sink", EXAMPLE)
    assert specification is not None
    assert specification.loader is not None
    module = module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "table_sink", module)  # where dataclasses look for it
    specification.loader.exec_module(module)
    return module


class Disk:
    """Fails from the n-th transaction on, as a disk that is full."""

    def __init__(self) -> None:
        self.left: int | None = None

    def fail(self, transactions: int | None) -> None:
        self.left = transactions

    def connect(self, path: Path) -> sqlite3.Connection:
        if self.left is not None:
            self.left -= 1
            if self.left <= 0:
                raise sqlite3.OperationalError("database or disk is full")
        return sqlite3.connect(path)


def told(example: Any, folder: Path, backend: Any = "asyncio") -> str:
    """Return the kit's complaint about the example's sink, or empty text."""
    disk = Disk()
    example.sqlite3 = Namespace(connect=disk.connect, Error=sqlite3.Error)
    make = partial(example.ProductTable, folder / "products.db")
    try:
        run_virtual(partial(check_sink, make, failing=disk.fail, pause_s=2.0), backend=backend)
    except ContractViolation as breach:
        return str(breach)
    return ""


class Namespace:
    def __init__(self, **names: Any) -> None:
        self.__dict__.update(names)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_table_conforms_with_a_disk_that_fails(example: Any, tmp_path: Path, backend: Any) -> None:
    assert told(example, tmp_path, backend) == ""


def rows_and_cursor_apart(example: Any) -> None:
    whole = example.ProductTable._on_thread

    async def on_thread(self: Any, function: Any) -> Any:
        if getattr(function, "func", None) != self._write:
            return await whole(self, function)
        states, next_offset, lamport = function.args
        await whole(self, partial(self._write, {}, next_offset, lamport))
        return await whole(self, partial(self._put, states))

    example.ProductTable._on_thread = on_thread


def never_folded_again(example: Any) -> None:
    example.must_fold_again = lambda logged, row, key: False


def late_rows_move_the_cursor(example: Any) -> None:
    fold_rows = example.fold_rows

    def taken(delivery: Any, states: Any, again: Any) -> Any:
        delivery.redelivered = False
        return fold_rows(delivery, states, again)

    example.fold_rows = taken


def repeats_are_folded(example: Any) -> None:
    fold = example.fold

    def folded(rows: Any, onto: Any) -> Any:
        return fold(
            rows, onto=example.VectorState(onto.alive, onto.vector, onto.data, onto.metadata, onto.ignored)
        )

    example.fold = folded
    example.encode_row = partial(without_key, example.encode_row, example.VectorState)


def without_key(columns: Any, make: Any, item: Any) -> Any:
    ref, state = item
    return columns(
        (ref, make(state.alive, state.vector, state.data, state.metadata, state.ignored, (0, 0, 0)))
    )


def committed_before_it_is_written(example: Any) -> None:
    apply = example.ProductTable.apply

    async def applied(self: Any, deliveries: Any) -> None:
        self._context.committed(deliveries[-1].next_offset)
        await anyio.lowlevel.checkpoint()
        await apply(self, deliveries)

    example.ProductTable.apply = applied


def rebuilds_are_not_remembered(example: Any) -> None:
    def begin(self: Any) -> None:
        with closing(sqlite3.connect(self.path)) as db, db:
            db.execute("DELETE FROM products")

    example.ProductTable._begin_rebuild = begin


def rejected_too_early(example: Any) -> None:
    async def apply(self: Any, deliveries: Any) -> None:
        for delivery in deliveries:
            rejected = example.fold_rows(delivery, {}, {})
            if rejected is not None:
                raise rejected
        await whole(self, deliveries)

    whole = example.ProductTable.apply
    example.ProductTable.apply = apply


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (rows_and_cursor_apart, {"committed"}),
        (never_folded_again, {"forwarded"}),
        (late_rows_move_the_cursor, {"late", "committed"}),
        (repeats_are_folded, {"repeats"}),
        (committed_before_it_is_written, {"committed"}),
        (rebuilds_are_not_remembered, {"rebuild"}),
        (rejected_too_early, {"failure"}),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_spoilt_table_is_found(spoil: Any, parts: set[str], example: Any, tmp_path: Path) -> None:
    spoil(example)
    found = told(example, tmp_path)
    assert found.partition(":")[0] in parts, found
