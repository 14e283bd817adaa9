"""The table sink of docs/sinks.md keeps the contract, and the kit finds each defect planted in it."""

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
    """The example as a separate module, in which a test may plant a defect."""
    specification = spec_from_file_location("table_sink", EXAMPLE)
    assert specification is not None
    assert specification.loader is not None
    module = module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "table_sink", module)  # dataclasses look up the module here
    specification.loader.exec_module(module)
    return module


class Disk:
    """Opens SQLite connections, one per transaction. After `fail(n)`, the disk is full from the n-th on."""

    def __init__(self) -> None:
        self.connections_left: int | None = None

    def fail(self, connections: int | None) -> None:
        self.connections_left = connections

    def connect(self, path: Path) -> sqlite3.Connection:
        if self.connections_left is not None:
            self.connections_left -= 1
            if self.connections_left <= 0:
                raise sqlite3.OperationalError("database or disk is full")
        return sqlite3.connect(path)


def complaint_about(example: Any, folder: Path, backend: Any = "asyncio") -> str:
    """Return the kit's complaint about the example's sink, or empty text."""
    disk = Disk()
    example.sqlite3 = Namespace(connect=disk.connect, Error=sqlite3.Error)
    make = partial(example.ProductTable, folder / "products.db")
    try:
        run_virtual(partial(check_sink, make, failing=disk.fail, pause_s=2.0), backend=backend)
    except ContractViolation as violation:
        return str(violation)
    return ""


class Namespace:
    def __init__(self, **names: Any) -> None:
        self.__dict__.update(names)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_table_conforms_on_a_failing_disk(example: Any, tmp_path: Path, backend: Any) -> None:
    assert complaint_about(example, tmp_path, backend) == ""


def write_rows_and_cursor_separately(example: Any) -> None:
    original = example.ProductTable._on_thread

    async def on_thread(self: Any, function: Any) -> Any:
        if getattr(function, "func", None) != self._write_with_cursor:
            return await original(self, function)
        states, next_offset, lamport = function.args
        await original(self, partial(self._write_with_cursor, {}, next_offset, lamport))
        return await original(self, partial(self._write_states, states))

    example.ProductTable._on_thread = on_thread


def never_refold(example: Any) -> None:
    example.must_fold_again = lambda logged, row, key: False


def move_cursor_for_redelivered_rows(example: Any) -> None:
    fold_rows = example.fold_rows

    def fold_as_new(delivery: Any, states: Any, to_refold: Any) -> Any:
        delivery.redelivered = False
        return fold_rows(delivery, states, to_refold)

    example.fold_rows = fold_as_new


def fold_duplicates(example: Any) -> None:
    fold = example.fold

    def fold_without_key(rows: Any, onto: Any) -> Any:
        return fold(
            rows, onto=example.VectorState(onto.alive, onto.vector, onto.data, onto.metadata, onto.ignored)
        )

    example.fold = fold_without_key
    example.encode_row = partial(encode_without_key, example.encode_row, example.VectorState)


def encode_without_key(encode_row: Any, make_state: Any, item: Any) -> Any:
    ref, state = item
    return encode_row(
        (ref, make_state(state.alive, state.vector, state.data, state.metadata, state.ignored, (0, 0, 0)))
    )


def commit_before_writing(example: Any) -> None:
    apply = example.ProductTable.apply

    async def apply_after_commit(self: Any, deliveries: Any) -> None:
        self._context.committed(deliveries[-1].next_offset)
        await anyio.lowlevel.checkpoint()
        await apply(self, deliveries)

    example.ProductTable.apply = apply_after_commit


def forget_rebuilds(example: Any) -> None:
    def begin(self: Any) -> None:
        with closing(sqlite3.connect(self.path)) as db, db:
            db.execute("DELETE FROM products")

    example.ProductTable._begin_rebuild = begin


def reject_too_early(example: Any) -> None:
    async def apply(self: Any, deliveries: Any) -> None:
        for delivery in deliveries:
            rejected = example.fold_rows(delivery, {}, {})
            if rejected is not None:
                raise rejected
        await original_apply(self, deliveries)

    original_apply = example.ProductTable.apply
    example.ProductTable.apply = apply


@pytest.mark.parametrize(
    ("plant_defect", "rules"),
    [
        (write_rows_and_cursor_separately, {"committed"}),
        (never_refold, {"forwarded"}),
        (move_cursor_for_redelivered_rows, {"released", "committed"}),
        (fold_duplicates, {"redelivery"}),
        (commit_before_writing, {"committed"}),
        (forget_rebuilds, {"rebuild"}),
        (reject_too_early, {"failure"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_broken_table_is_found(plant_defect: Any, rules: set[str], example: Any, tmp_path: Path) -> None:
    plant_defect(example)
    complaint = complaint_about(example, tmp_path)
    assert complaint.partition(":")[0] in rules, complaint
