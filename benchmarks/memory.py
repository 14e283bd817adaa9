"""Measures memory use: of a delta in each part of the service, an id, a vector, a producer, a connection.

Each case has a process of its own, which opens a service, measures itself (or the server), adds many items,
and measures again. Only anonymous memory counts. The table also has the service's own estimate, if its memory
limits include one.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import anyio
import numpy as np

from benchmarks._growth_service import CountingSink, send, vector_id
from benchmarks._measure import table
from benchmarks._peers_contract import Wire, connect
from benchmarks._peers_ours import Ours, hello_of, next_frame, subscription_of
from benchmarks._processes import end_on_sigterm, run_forked, send_errors
from benchmarks._results import Goal, Results, options_of
from benchmarks.sustained import private_mb
from delta_prop.api.propagator import Propagator
from delta_prop.api.settings import (
    BYTES_PER_HEAD,
    BYTES_PER_ORIGIN,
    BYTES_PER_PENDING,
    BYTES_PER_RECENT_ID,
    Settings,
)
from delta_prop_sinks import Delivery, ResidentVectors, StorageSink
from delta_prop_wire.batch import Batch
from delta_prop_wire.delta import AckLevel, Delta, Dot, Kind, Priority, make_origin, opaque, producer_id_of
from delta_prop_wire.encode import encode_batch, encode_vectors
from delta_prop_wire.topics import Topic, TopicKind

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

MIB = 1 << 20
PAYLOAD = bytes(128)
KEYS = 1_000
LARGE_LIMITS = {"rate_initial": 1e9, "rate_max": 1e9, "pending_timeout_s": 3_600.0}
FRAME_BYTES = 350
"""Bytes of a single delta's frame, which the service's limits count separately."""
STEP = 10_000
"""Deltas that are encoded and sent at a time."""
CONNECTIONS, FIRST_CONNECTIONS = 75, 20
"""Connections that are measured, and those opened before. A server limits connections from one address; the
sum is below the limit.
"""
WAIT_S = 60.0


def held_bytes(process_id: int | None = None) -> float:
    """Return the anonymous memory of a process, by default this one, after a garbage collection."""
    gc.collect()
    return private_mb(process_id or os.getpid()) * MIB


def frames(
    name: str,
    delta_count: int,
    batch_rows: int,
    *,
    first: int = 1,
    with_ids: bool = False,
    parents: tuple[Dot, ...] = (),
    level: AckLevel = AckLevel.MEMORY,
) -> list[Batch]:
    """Return batches of deltas of 128 B, of a thousand vectors, under dots of one producer.

    `first`: the counter of the first delta; `parents`: those of the first delta.
    """
    origin = make_origin(producer_id_of(name), Priority.NORMAL)

    def delta(number: int) -> Delta:
        return Delta(
            vector_id(number % KEYS),
            opaque(PAYLOAD),
            id=b"%016d" % number if with_ids else None,
            parents=parents if number == first else (),
        )

    return [
        encode_batch(
            [delta(number) for number in range(base, base + batch_rows)],
            origin=origin,
            base=base,
            ack_level=level,
        )
        for base in range(first, first + delta_count, batch_rows)
    ]


def make_settings(**changes: int) -> Settings:
    """Return the default settings with large limits and these changes."""
    return Settings(**{**LARGE_LIMITS, **changes})  # type: ignore[arg-type]


async def logged_delta_bytes(count: int, *, has_directory: bool) -> float:
    """Measure a delta in a log in memory; with `has_directory`, what stays in memory of a delta on disk."""
    level = AckLevel.LOGGED if has_directory else AckLevel.MEMORY
    with tempfile.TemporaryDirectory() as folder:
        async with Propagator(make_settings(), data=folder if has_directory else None) as propagator:
            producer = propagator.producer("log")
            await send(producer, frames("log", STEP, 100, level=level))
            before, sent = held_bytes(), 0
            while sent < count:  # each step drops its batches, so that only the service holds them
                sent += STEP
                await send(producer, frames("log", STEP, 100, first=1 + sent, level=level))
            return (held_bytes() - before) / sent


class _StuckSink(CountingSink):
    """A sink whose calls do not return until `ended` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = anyio.Event()

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Wait for `ended`."""
        await self.ended.wait()


async def mailbox_delta_bytes(count: int) -> float:
    """Measure a delta, in a batch of one, that waits for a sink, without its bytes in the log."""
    limits = make_settings(mailbox_deltas_max=2 * count, mailbox_bytes_max=1 << 30)
    async with Propagator(limits) as propagator:
        producer = propagator.producer("mail")
        await send(producer, frames("mail", 1_000, 1))
        held = [held_bytes()]
        for turn in range(2):
            await send(producer, frames("mail", count, 1, first=1_001 + turn * count))
            held.append(held_bytes())
            if not turn:
                stuck = await propagator.attach(_StuckSink(), start="latest")
        stuck.ended.set()
    # In the first turn deltas fill only the log, in the second one the log and the mailbox.
    return (held[2] - 2 * held[1] + held[0]) / count


async def pending_delta_bytes(count: int) -> float:
    """Measure a delta, in a batch of one, that waits for its predecessor; the first one waits forever."""
    async with Propagator(
        make_settings(pending_deltas_max=5 * count, pending_bytes_max=1 << 30)
    ) as propagator:
        producer = propagator.producer("gap")
        before = held_bytes()
        never = Dot(make_origin(producer_id_of("never"), Priority.NORMAL), 1)
        for batch in frames("gap", count, 1, parents=(never,)):
            producer.send_frame(batch)
        with anyio.fail_after(WAIT_S):
            while propagator.statistics().pending.pending_deltas < count:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        return (held_bytes() - before) / count


async def seen_id_bytes(count: int) -> float:
    """Measure a recently seen id."""
    return await _bytes_per_delta(
        count, lambda at, rows: frames("ids", rows, rows, first=1 + at, with_ids=True)
    )


async def head_bytes(count: int) -> float:
    """Measure a vector's last dot with its id."""
    origin = make_origin(producer_id_of("heads"), Priority.NORMAL)
    zeros = np.zeros((1_000, 1), np.float32)

    def batches(at: int, rows: int) -> list[Batch]:
        keys = [vector_id(number) for number in range(at, at + rows)]
        return [encode_vectors(keys, zeros, namespace="n", origin=origin, base=1 + at)]

    return await _bytes_per_delta(count, batches, name="heads")


async def _bytes_per_delta(
    count: int, batches: Callable[[int, int], list[Batch]], *, name: str = "ids"
) -> float:
    """Measure what each delta adds to memory, with a log that retains few deltas.

    `batches`: from the number of earlier deltas and the number of rows, the batches to send.
    """
    async with Propagator(make_settings(log_deltas_max=20_000, log_bytes_max=16 * MIB)) as propagator:
        producer = propagator.producer(name)
        step = 1_000
        for at in range(0, 40_000, step):
            await send(producer, batches(at, step))
        before = held_bytes()
        for at in range(40_000, 40_000 + count, step):
            await send(producer, batches(at, step))
        return (held_bytes() - before) / count


async def producer_bytes(count: int) -> float:
    """Measure a producer, which has an origin for each priority."""
    async with Propagator(make_settings(log_deltas_max=1_000, origins_max=5 * count + 10_000)) as propagator:

        async def add(first: int, last: int) -> None:
            for number in range(first, last):
                name = f"producer-{number}"
                await send(propagator.producer(name), frames(name, 1, 1))

        await add(0, 2_000)
        before = held_bytes()
        await add(2_000, 2_000 + count)
        return (held_bytes() - before) / count


async def subscription_bytes(count: int) -> float:
    """Measure a subscription of a vector, read by a task."""
    async with Propagator(make_settings()) as propagator, anyio.create_task_group() as tasks:

        async def read(number: int) -> None:
            async with propagator.subscribe(f"v:{vector_id(number)}") as deltas:
                async for _ in deltas:
                    pass

        before = held_bytes()
        for number in range(count):
            tasks.start_soon(read, number)
        with anyio.fail_after(WAIT_S):
            while len(propagator.statistics().sinks) < count:  # noqa: ASYNC110
                await anyio.sleep(0.1)
        grown = held_bytes() - before
        tasks.cancel_scope.cancel()
    return grown / count


async def vector_bytes(count: int) -> float:
    """Measure a vector of 16 numbers in a storage sink, with its head."""
    origin = make_origin(producer_id_of("heads"), Priority.NORMAL)
    with tempfile.TemporaryDirectory() as folder:
        async with Propagator(make_settings(log_deltas_max=50_000)) as propagator:
            resident = ResidentVectors(resident_bytes_max=4 << 30)
            await propagator.attach(StorageSink(Path(folder) / "vectors.db", resident=resident))
            producer = propagator.producer("heads")
            matrix = np.ones((1_000, 16), np.float32)
            before, warm_up = 0.0, 60_000
            for first in range(0, warm_up + count, 1_000):
                keys = [vector_id(number) for number in range(first, first + 1_000)]
                await send(
                    producer,
                    [
                        encode_vectors(
                            keys, matrix, namespace="n", origin=origin, base=1 + first, kind=Kind.CREATE
                        )
                    ],
                )
                if not (first + 1_000) % 10_000:
                    await propagator.wait_visible(first + 1_000, committed=True, timeout_s=WAIT_S)
                if first + 1_000 == warm_up:
                    before = held_bytes()
            return (held_bytes() - before) / count


async def connection_bytes(count: int, *, subscribed: bool = False) -> float:
    """Measure a connection that has said hello; if `subscribed`, with a group that reads its own topic."""
    with Ours().running() as server:
        (process,), wires = server.processes, []
        for number in range(FIRST_CONNECTIONS + count):
            if number == FIRST_CONNECTIONS:
                before = held_bytes(process.pid)
            wire = _connect(server.port, number, subscribed=subscribed)
            wires.append(wire)
        grown = held_bytes(process.pid) - before
        for wire in wires:
            wire.socket.close()
        return grown / count


def _connect(port: int, number: int, *, subscribed: bool) -> Wire:
    wire = Wire(connect(port))
    wire.send(hello_of(f"client-{number}"))
    next_frame(wire)
    if subscribed:
        wire.send(subscription_of(Topic(TopicKind.NAMESPACE, f"t{number}"), f"group-{number}"))
        next_frame(wire)
    return wire


class Case(NamedTuple):
    """One case: its name, its function, the number of items to add, and the service's own estimate."""

    name: str
    measure: Callable[[int], Awaitable[float]]
    item_count: int
    expected_bytes: int | None = None


CASES = (
    Case("delta of 128 B, log in memory", partial(logged_delta_bytes, has_directory=False), 200_000),
    Case("delta of 128 B, log in a directory", partial(logged_delta_bytes, has_directory=True), 1_000_000),
    Case("single delta in a mailbox, beside the log", mailbox_delta_bytes, 50_000),
    Case("single delta that waits for another", pending_delta_bytes, 20_000, BYTES_PER_PENDING + FRAME_BYTES),
    Case("id seen lately", seen_id_bytes, 200_000, BYTES_PER_RECENT_ID),
    Case("vector's head", head_bytes, 500_000, BYTES_PER_HEAD),
    Case("vector of 16 numbers in storage, with its head", vector_bytes, 200_000),
    Case("producer, an origin for each priority", producer_bytes, 5_000, len(Priority) * BYTES_PER_ORIGIN),
    Case("subscription of a vector, in process", subscription_bytes, 2_000),
    Case("connection", connection_bytes, CONNECTIONS),
    Case("connection with a group that reads", partial(connection_bytes, subscribed=True), CONNECTIONS),
)


# --- running


def run(name: str, count: int, pipe: Connection) -> None:
    """Run a case in this process: send the bytes of one item, or the error, to the parent."""
    (case,) = (case for case in CASES if case.name == name)
    end_on_sigterm()
    with send_errors(pipe, f"{name}: "):
        pipe.send(anyio.run(case.measure, count))


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write; return the exit status."""
    parser = options_of("memory", __doc__, rounds=3)
    parser.add_only([case.name for case in CASES], "only cases whose name contains PART")
    given = parser.parse_args(arguments)
    bytes_by_case: dict[Case, list[float]] = {}
    for _ in range(1 if given.quick else given.rounds):
        for case in CASES:
            if case.name in given.only:
                bytes_by_case.setdefault(case, []).append(
                    run_forked(run, case.name, count_of(case, given.quick), timeout_s=300)
                )
                print(f"{case.name}: {bytes_by_case[case][-1]:,.0f} B", file=sys.stderr)
    return report(bytes_by_case, quick=given.quick).finish(given.json)


def count_of(case: Case, quick: bool) -> int:
    """Return the number of items to add."""
    return max(case.item_count // 4, 75) if quick else case.item_count


def report(bytes_by_case: Mapping[Case, Sequence[float]], *, quick: bool = False) -> Results:
    """Return table, figures, goals."""
    results = Results("memory")
    rows = []
    for case, rounds in bytes_by_case.items():
        figure = results.add_figure(case.name, rounds, "B", less=True)
        bound = case.expected_bytes
        rows.append((case.name, f"{count_of(case, quick):,}", figure, "" if bound is None else f"{bound:,}"))
        if bound is not None:
            results.add_goal(Goal("", f"memory: {case.name}", bound, unit="B", less=True), rounds)
    results.tables.append(table("bytes of memory of one", ("", "added", "B", "bound"), rows))
    results.notes.append(
        "the bytes of one depend on how many were added, because tables grow by doubling: compare two runs "
        f"only if both or neither used --quick; this one {'did' if quick else 'did not'}"
    )
    return results


if __name__ == "__main__":
    sys.exit(main())
