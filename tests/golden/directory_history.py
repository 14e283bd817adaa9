"""The history of a small data directory, with one of everything that a version writes to disk.

It runs in virtual time on a simulated disk, so one version writes the same bytes each time.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio

from delta_prop import (
    Delta,
    LogSettings,
    Operation,
    Priority,
    Propagator,
    Refused,
    Settings,
    create,
    delete,
    metadata_only,
    opaque,
    scale,
    sparse,
    sparse_add,
)
from delta_prop.calls.receipt import Receipt
from delta_prop.delivery.group_cursor import GroupCursor
from delta_prop.partition.ingest.work import Sender, SequencedBatch
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_sinks import CallbackSink
from delta_prop_wire.delta import Source, make_origin
from delta_prop_wire.encode import encode_batch, encode_noop
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.durable.histories import resend_batch
from tests.delta_prop.durable.quarantined import RejectingSink, Store
from tests.delta_prop.support import claim_origins, offer_now

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from delta_prop_wire.batch import Batch

SETTINGS = LogSettings(
    segment_bytes_max=8_192,
    bytes_max=1 << 20,
    retention_bytes=1 << 19,
    free_bytes_min=0,
    reserve_bytes=0,
    min_compaction_lag_s=100.0,
    compress="lz4",
    made_by="golden",
)
AUDIT, ADDS, GROUP, IMPORTER, EDITOR = "Prüfer", "adds", "reports", "import-α", "редактор"
"""Names of two sinks, a group and two producers."""
DIMENSION = 320
IDS = {name: name.encode().ljust(16, b".") for name in ("first", "second", "last")}
IDENTIFIED = (
    Delta("one", create([1.0]), "ids", id=IDS["first"], timestamp=77),
    Delta("two", create([2.0]), "ids", id=IDS["second"], parents=(IDS["first"],), metadata={"ü": "ß"}),
    Delta("three", create([3.0]), "ids", id=IDS["last"]),
)
EPOCH = 4097  # the first epoch granted after the first opening
RESENDER, OTHER_SERVICE = make_origin(7, Priority.NORMAL), make_origin(77, Priority.NORMAL)
"""Origins of a producer whose frames are resent unchanged, and of another service."""


def _frame(base: int, *deltas: Delta) -> Batch:
    return encode_batch(deltas, origin=RESENDER, base=base, epoch=EPOCH)


def _delta_with_own_id(vector_id: str, operation: Operation) -> Delta:
    return Delta(vector_id, operation, "ids", id=vector_id.encode().ljust(16, b"."))


FRAMES = {
    "id known, id new": _frame(1, IDENTIFIED[0], _delta_with_own_id("four", create([4.0]))),
    "ids known": _frame(3, IDENTIFIED[0], _delta_with_own_id("four", create([4.0]))),
    "refused": _frame(5, Delta("doc-0", scale(2.0), "docs"), Delta("nobody", scale(2.0), "docs")),
    "refused with an id": _frame(7, _delta_with_own_id("nobody", scale(2.0))),
}
"""Frames, each of which leaves control rows in the log."""
REFUSED = _delta_with_own_id("nobody-else", scale(2.0))
"""A delta that is refused without a dot, so that only a checkpoint has its id."""
NOOP = encode_noop(origin=OTHER_SERVICE, base=1, count=2, code=ErrorCode.CONFLICT, refused_crc=7)
"""A no-op of another service's refusal."""


async def resend_frame(p: Propagator, batch: Batch) -> list[int | None] | str:
    """Resend a frame; return its rows' offsets or its error code."""
    receipt = await resend_batch(p, batch, Sender("teller"))
    refusal = receipt.refusal()
    return (
        refusal.code.name
        if refusal is not None
        else [position.offset for position in receipt.result().row_acks()]
    )


def write_directory() -> SimDisk:
    """Write the directory in three sessions: the second is killed, the others are closed cleanly."""
    disk = SimDisk(1)
    run_virtual(lambda: _session(disk, 1, _publish_first_session, SETTINGS))
    killed_disks: list[SimDisk] = []

    async def publish_then_kill(p: Propagator) -> None:
        await _publish_second_session(p)
        killed_disks.append(disk.kill())

    run_virtual(lambda: _session(disk, 2, publish_then_kill, SETTINGS))
    disk = killed_disks[0]
    run_virtual(lambda: _session(disk, 3, _publish_third_session, replace(SETTINGS, compress="zstd")))
    return disk


def service(disk: SimDisk, seed: int, settings: LogSettings) -> Propagator:
    return Propagator(Settings(), data="x", log=settings, world=virtual_world(seed, disk=disk))


def large_vector(value: float) -> Operation:
    """Return a vector large enough for its frame to be compressed."""
    return create([value] * DIMENSION)


async def _session(
    disk: SimDisk, seed: int, main: Callable[[Propagator], Awaitable[None]], settings: LogSettings
) -> None:
    async with service(disk, seed, settings) as p:
        await p.attach(CallbackSink(lambda offset, _: None, name=AUDIT))
        await p.attach(RejectingSink(Store(keeps_cursor=False), {7.0}), name="adds", topics="ns:adds")
        await main(p)
        group = GroupCursor(disk, GROUP, p.internals().partition.log.log_id)
        group.next_offset = p.statistics().log.high_watermark - 1
        group.close()
        await anyio.sleep(2)  # cursors are written, sealed segments are compressed


async def _publish_first_session(p: Propagator) -> None:
    """Publish deltas, and wait until they are old enough for a snapshot."""
    importer = p.producer(IMPORTER)
    for number in range(24):
        await importer.publish(Delta(f"doc-{number % 5}", large_vector(number % 3), "docs"))
    await importer.publish(
        Delta("doc-1", sparse([0, DIMENSION - 1], [9.0, 9.5]), "docs", metadata={"title": "Größe"})
    )
    await importer.publish(Delta("doc-2", delete(), "docs"))
    await p.publish(Delta("行-1", opaque("größer als 数".encode()), "行"))
    await anyio.sleep(200)  # beyond min_compaction_lag_s
    await importer.publish(Delta("doc-3", sparse_add([1], [0.5]), "docs"))
    await anyio.sleep(5)


async def _publish_second_session(p: Propagator) -> None:
    importer, editor = p.producer(IMPORTER), p.producer(EDITOR)
    published = await importer.publish(
        Delta("doc-0", large_vector(1.5), "docs", priority=Priority.HIGH, topics=("urgent", "größer"))
    )
    assert published.last_dot is not None
    await editor.publish(Delta("doc-0", sparse_add([2], [0.25]), "docs"), after=[published.last_dot])
    await editor.publish(Delta("doc-4", metadata_only(), "docs", metadata={"tags": ["a", None], "n": 1}))
    for vector_id in ("nobody", "doc-2"):
        try:
            await editor.publish(Delta(vector_id, sparse([0], [1.0]), "docs"))
        except Refused:
            continue
        raise AssertionError("the service must refuse this delta")
    await p.publish(IDENTIFIED[0])
    await p.publish(IDENTIFIED[1])
    claim_origins(p, 7, "teller")
    outcomes = [await resend_frame(p, frame) for frame in FRAMES.values()]
    assert [code for code in outcomes if isinstance(code, str)] == ["INVALID_DELTA"] * 2, outcomes
    await offer_now(p, SequencedBatch(NOOP, Sender("far", Source.REPLICA), Receipt(), lamport=500))
    with suppress(Refused):
        await p.publish(REFUSED)
        raise AssertionError("the service must refuse this delta")
    for value in (1.0, 7.0, 2.0):
        await p.publish(Delta("sum", sparse_add([0], [value]) if value > 1 else create([1.0]), "adds"))
    for number in range(24):
        await importer.publish(Delta(f"doc-{number % 5}", large_vector(number % 4), "docs"))
    await anyio.sleep(2)


async def _publish_third_session(p: Propagator) -> None:
    importer = p.producer(IMPORTER)
    for number in range(24):
        await importer.publish(Delta(f"doc-{5 + number % 5}", large_vector(number % 5), "docs"))
    await anyio.sleep(3)
    await p.publish(IDENTIFIED[2])
    await importer.publish(Delta("doc-9", opaque(bytes(range(256))), "docs"))
