"""Writers and readers whose process or connection ends: the recorded history equals the log."""

from __future__ import annotations

from random import Random

import anyio
import pytest

from delta_prop import LogSettings, Propagator
from delta_prop.testing import NetworkConditions, run_virtual, virtual_world
from delta_prop_simulations.chaos.histories import SUM, ClientHistory, LogHistory, token_of
from delta_prop_simulations.chaos.plan import ReaderPlan, WriterPlan
from delta_prop_simulations.chaos.workload import Reader, Writer
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import AckLevel
from tests.delta_prop.client.virtual_service import ADDRESS, Site, with_service

SEEDS = range(4)


def make_writer(history: ClientHistory, seed: int, level: AckLevel | None = None) -> Writer:
    level_name = None if level is None else level.name.lower()
    plan = WriterPlan(
        f"w{seed}", "n", embedded=False, deltas=60, burst=5, gap_s=0.02, level=level_name, poison=0.05
    )
    return Writer(plan, Random(seed), history)


def offsets_by_token(log_history: LogHistory) -> dict[str, int]:
    """Return the offset of each token."""
    offsets = {}
    for offset, logged, row in log_history.rows():
        token = token_of(logged.batch, row)
        if token is not None:
            assert token not in offsets
            offsets[token] = offset
    return offsets


def check_outcomes(log_history: LogHistory, history: ClientHistory) -> None:
    offsets = offsets_by_token(log_history)
    for token, outcome in history.outcomes.items():
        if token.startswith(SUM):
            continue
        assert outcome.acks or outcome.refused or outcome.is_unknown
        if outcome.acks:
            assert {ack.offset for ack in outcome.acks} <= {offsets[token], None}
        elif outcome.refused:
            assert token not in offsets


@pytest.mark.parametrize("seed", SEEDS)
def test_embedded_writers_continue_after_process_ends(seed: int) -> None:
    history, log_history = ClientHistory(), LogHistory("n")
    writer = make_writer(history, seed)
    disk = SimDisk(seed)

    async def run_process(seed: int, ended_before: str | None, limit_s: float) -> None:
        nonlocal disk
        world = virtual_world(seed, thread_delay_s_max=0.01, disk=disk)
        async with Propagator(data="x", log=LogSettings(), world=world) as p:
            log_history.start(p.internals().partition.log, ended_before)
            with anyio.move_on_after(limit_s) as scope:
                await writer.run_embedded(p)
            if scope.cancelled_caught:
                disk.is_off = True
                disk = disk.kill()

    run_count = 0
    while not writer.is_done:
        try:
            run_virtual(
                run_process,
                seed + run_count,
                "killed" if run_count else None,
                0.1 if run_count < 4 else 300.0,
            )
        except BaseException as error:  # raised by a process whose disk is switched off
            if not disk_is_off(error):
                raise
        run_count += 1
    assert run_count >= 2
    check_outcomes(log_history, history)
    assert history.counts["acknowledged"] > 10


def disk_is_off(error: BaseException) -> bool:
    """Return True if an error comes from a disk that is off."""
    if isinstance(error, BaseExceptionGroup):
        return all(disk_is_off(inner) for inner in error.exceptions)
    return "off" in str(error) or type(error).__name__ == "SimCrash"


@pytest.mark.parametrize("seed", SEEDS)
def test_remote_clients_continue_after_broken_connections(seed: int) -> None:
    history, log_history = ClientHistory(), LogHistory("n")
    writer = make_writer(history, seed)
    readers = [
        Reader(ReaderPlan("all", "n")),
        Reader(ReaderPlan("filtered", "n", topics="ns:b", group=True, batches=False)),
    ]

    async def scenario(site: Site) -> None:
        log_history.start(site.propagator.internals().partition.log, None)
        async with anyio.create_task_group() as tasks:
            for reader in readers:
                tasks.start_soon(reader.run, site.world, ADDRESS)
            run_count = 0
            while not writer.is_done:
                run_count += 1
                with anyio.move_on_after(0.4 if run_count < 5 else 100):
                    await writer.run(site.world, ADDRESS)
                site.network.reset()
            await anyio.sleep(5)
            tasks.cancel_scope.cancel()

    with_service(scenario, seed=seed, conditions=NetworkConditions(latency_s=0.002, jitter_s_max=0.01))
    check_outcomes(log_history, history)
    rows = [(offset, logged.batch, row) for offset, logged, row in log_history.rows()]
    check_read(readers[0], {offset for offset, _, _ in rows})
    check_read(readers[1], {offset for offset, batch, row in rows if batch.namespaces[row] == "b"})


def check_read(reader: Reader, expected_offsets: set[int]) -> None:
    assert {offset for session in reader.sessions for offset, _ in session.rows} == expected_offsets
    for session in reader.sessions:
        offsets = [offset for offset, _ in session.rows]
        assert offsets == sorted(set(offsets))
