"""Control rows of types that this version does not use are skipped in a log, and never forwarded."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop import Delta, LogSettings, Propagator, Settings, create
from delta_prop.cli import main
from delta_prop.testing import VirtualNetwork, run_virtual, virtual_world
from delta_prop_broker.local_disk import LocalDisk
from delta_prop_simulations.disk import SimDisk
from delta_prop_sinks import CallbackSink
from delta_prop_wire.control_rows import ControlType
from delta_prop_wire.delta import Source
from delta_prop_wire.encode import encode_noop
from delta_prop_wire.spec import ErrorCode
from tests.broker.durable import Writer, commit, open_log
from tests.delta_prop.partition.test_forwarded_batches import FAR_ORIGIN, ForwardTarget, make_deltas
from tests.delta_prop.server.test_forwarding import Node
from tests.wire.control_batches import control_batch

if TYPE_CHECKING:
    from pathlib import Path

    from delta_prop_broker.disk import Disk

OTHER_TYPES = [kind for kind in ControlType if kind is not ControlType.REFUSED]
LOG = LogSettings(free_bytes_min=0, reserve_bytes=0, segment_bytes_max=2_000)


def control_row(kind: int) -> bytes:
    return bytes((kind,)) + b"of a later version"


@pytest.mark.parametrize("kind", OTHER_TYPES)
def test_forwarded_batch_of_another_control_type_is_refused(kind: ControlType) -> None:
    bench = ForwardTarget()
    before = bench.pipeline.appender.lamport
    refusal = bench.forward_batch(control_batch(control_row(kind)), 700).refusal()
    assert refusal is not None
    assert (refusal.code, refusal.retryable) == (ErrorCode.INVALID_DELTA, False)
    assert "only those of type 0" in refusal.message
    assert bench.routed == []
    assert 0 not in bench.pipeline.orderer.watermarks
    assert bench.pipeline.appender.lamport == before
    assert bench.forward_batch(
        encode_noop(origin=FAR_ORIGIN, base=1, count=1, code=ErrorCode.CONFLICT), 1
    ).acknowledged
    assert bench.forward(2, *make_deltas("a")).acknowledged


def append_other_types(disk: Disk) -> int:
    """Append a batch of each type and of an unknown one; return the next offset."""
    log, _ = open_log(disk, LOG)
    writer = Writer(log)
    for kind in (*OTHER_TYPES, 7):
        writer.append_batch(control_batch(control_row(kind), control_row(kind)))
        commit(log)
    end = log.next_offset
    log.close()
    return end


def open_propagator(disk: SimDisk, seed: int) -> Propagator:
    return Propagator(Settings(close_timeout_s=5), data="x", log=LOG, world=virtual_world(seed, disk=disk))


@pytest.mark.parametrize("has_checkpoint", [True, False], ids=["with a checkpoint", "from the log"])
def test_service_continues_a_log_with_other_control_types(has_checkpoint: bool) -> None:
    disk, seen = SimDisk(1), list[int]()

    async def run_service(seed: int, key: str) -> tuple[int, dict[int, int]]:
        async with open_propagator(disk, seed) as p:
            await p.attach(CallbackSink(lambda offset, _: seen.append(offset), name="all"))
            published = await p.producer("writer").publish(Delta(key, create([1.0]), "n"))
            await p.wait_visible(published)
            if not has_checkpoint:
                p.internals().partition.storage.checkpointer = None
            assert published.offset is not None
            return published.offset, dict(p.internals().partition.pipeline.orderer.watermarks)

    first, watermarks = run_virtual(lambda: run_service(1, "a"))
    end = append_other_types(disk)
    offset, watermarks_after = run_virtual(lambda: run_service(2, "b"))
    assert (first, offset, end) == (0, end, 1 + 2 * (len(OTHER_TYPES) + 1))
    (origin,) = (origin for origin in watermarks if watermarks[origin])
    assert watermarks_after == {**watermarks, origin: 2}
    assert seen == [first, offset]
    log, _ = open_log(disk, LOG, read_only=True)
    lamport_numbers = [frame.logged.lamport for frame in log.frames()]
    assert lamport_numbers == sorted(lamport_numbers)
    assert lamport_numbers[-1] > lamport_numbers[-2] + 1, (
        "the next Lamport number must be above those of the control rows"
    )


def test_snapshot_has_no_watermark_of_other_control_types() -> None:
    disk = SimDisk(1)
    settings = LogSettings(
        free_bytes_min=0, reserve_bytes=0, segment_bytes_max=200, retention_bytes=1, min_compaction_lag_s=1.0
    )
    log, _ = open_log(disk, settings)
    writer = Writer(log)
    writer.append(2)
    for kind in (*OTHER_TYPES, 7):
        log.append(control_batch(control_row(kind)), lamport=log.next_offset + 1, source=Source.LOCAL)
    for _ in range(20):
        writer.append(2)
    commit(log, sync=True)
    log.close()

    async def run_service() -> None:
        async with Propagator(data="x", log=settings, world=virtual_world(3, disk=disk)):
            await anyio.sleep(200)

    run_virtual(run_service)
    log, _ = open_log(disk, settings, read_only=True)
    snapshot = log.snapshot()
    assert snapshot is not None
    assert snapshot.offset > 2
    assert set(snapshot.watermarks) == {16}
    snapshot.close()


def test_forwarder_skips_other_control_types() -> None:
    async def run() -> None:
        network = VirtualNetwork(3)
        async with AsyncExitStack() as exits:
            nodes = [Node(name, network) for name in ("1", "2")]
            for node in nodes:
                await node.open(exits)
            a, b = nodes
            await a.write(2)
            for kind in (*OTHER_TYPES, 7):
                logged = a.p.internals().partition.pipeline.appender.log.append(
                    control_batch(control_row(kind)),
                    lamport=a.p.internals().partition.pipeline.appender.lamport + 1,
                    source=Source.LOCAL,
                )
                a.p.internals().partition.pipeline.appender.skip(logged)
            await a.write(2)
            await a.forward_to(b)
            with anyio.fail_after(60):
                while a.statistics_to(b).lag:  # noqa: ASYNC110 - no event to wait for
                    await anyio.sleep(0.2)
            rows_of_deltas = [row for row in a.logged_dots() if row[0]]
            assert len(rows_of_deltas) == 4
            assert b.logged_dots() == rows_of_deltas

    run_virtual(run)


def test_log_show_names_control_types(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append_other_types(LocalDisk(tmp_path))
    assert main(["log", "show", "--json", "--data", str(tmp_path)]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()][::2]
    assert [row["type"] for row in printed] == [*(kind.name.lower() for kind in OTHER_TYPES), "unknown"]
    assert {row["op"] for row in printed} == {"control"}
    assert main(["log", "show", "--data", str(tmp_path)]) == 0
    assert "leader_start" in capsys.readouterr().out
