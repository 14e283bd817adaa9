"""After any operations on a quarantine, its file holds the same rows, reasons and drops as the memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from delta_prop.delivery.quarantine import Quarantine
from delta_prop.delivery.quarantine_file import QuarantineFile, read_stored
from delta_prop.delivery.quarantines import QuarantineWriter, restore_quarantine
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.log.settings import LogSettings
from delta_prop_simulations.disk import SimDisk
from delta_prop_sinks.sink import Delivery
from delta_prop_wire.delta import Source
from delta_prop_wire.encode import encode_batch
from tests.broker.durable import Clock, FixedRandomness
from tests.delta_prop.durable.quarantined import make_addition

if TYPE_CHECKING:
    from delta_prop_wire.batch import LoggedBatch

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["batch", "batch", "batch", "replay", "drop", "rewind", "truncate", "restart"]),
        st.lists(st.sampled_from("abc"), min_size=1, max_size=4),
        st.integers(0, 30),
        st.booleans(),  # true: the quarantine is written after the step
    ),
    min_size=4,
    max_size=20,
)

State = tuple[list[tuple[int, int, str | None, bytes]], list[int]]


def state(quarantine: Quarantine) -> State:
    records = [
        (record.offset, record.blocked_by, record.reason, bytes(record.logged.batch.body))
        for record in quarantine.records()
    ]
    return records, sorted(quarantine.dropped_offsets)


def append(log: DurableLog, keys: list[str]) -> LoggedBatch:
    batch = encode_batch([make_addition(key, 1) for key in keys], origin=16, base=log.next_offset + 1)
    return log.append(batch, lamport=log.next_offset + 1, source=Source.LOCAL)


def step(quarantine: Quarantine, logged: LoggedBatch | None, kind: str, number: int) -> None:
    """Run one operation: append a batch with a rejected row, act as the operator, or restart."""
    if logged is not None:
        split = quarantine.hold_dependents(Delivery(logged), at_us=number)
        if split.passing is not None and number % 3:
            passing = split.passing
            row = 0 if passing.rows is None else int(passing.rows[0])
            quarantine.reject(logged, row, f"no {number}", at_us=number)
            quarantine.hold_dependents(Delivery(logged), at_us=number)
    elif kind == "rewind":
        quarantine.resume_from(number)
    elif kind == "truncate":
        quarantine.truncate(number)
    elif heads := [record.offset for record in quarantine.records() if record.blocked_by == record.offset]:
        head = heads[number % len(heads)]
        if kind == "replay":
            quarantine.replay(head)
        else:
            quarantine.drop(head)


@given(STEPS, st.sampled_from([0, 200, 1 << 20]))
def test_quarantine_file_equals_the_quarantine(
    steps: list[tuple[str, list[str], int, bool]], spare_bytes: int
) -> None:
    async def main() -> None:
        disk = SimDisk(1)
        log, _ = DurableLog.open(disk, settings=LogSettings(), randomness=FixedRandomness(), clock=Clock())
        world = virtual_world(1)
        quarantine = Quarantine(10, 1 << 20)

        def new_writer(quarantine: Quarantine) -> QuarantineWriter:
            file = QuarantineFile(disk, "s", log)
            return QuarantineWriter(quarantine, file, world.new_threads(), spare_bytes=spare_bytes)

        def read() -> Quarantine:
            restored = Quarantine(10, 1 << 20)
            stored = read_stored(disk, "s", log.epoch_end)
            if stored is not None:
                restore_quarantine(restored, stored)
            return restored

        writer, stored_state = new_writer(quarantine), state(quarantine)
        for kind, keys, number, writes in steps:
            if kind == "restart":  # changes that were not written are lost
                await writer.close()
                quarantine = read()
                assert state(quarantine) == stored_state
                writer = new_writer(quarantine)
            else:
                step(quarantine, append(log, keys) if kind == "batch" else None, kind, number)
            if writes:
                await writer.write()
                stored_state = state(quarantine)
                assert not writer.is_dirty
                assert state(read()) == stored_state

    run_virtual(main)
