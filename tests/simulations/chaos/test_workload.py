"""Writers and readers over the ends of processes and connections: what the shadow is told has happened."""

from __future__ import annotations

from random import Random

import anyio
import pytest

from delta_prop import LogSettings, Propagator
from delta_prop.testing import NetworkConditions, run_virtual, virtual_world
from delta_prop_simulations.chaos.client_history import SUM, ClientHistory, token_of
from delta_prop_simulations.chaos.log_history import LogHistory
from delta_prop_simulations.chaos.readers import Reader
from delta_prop_simulations.chaos.workload import Writer
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import AckLevel
from tests.delta_prop.client.serving import ADDRESS, Site, with_service

SEEDS = range(4)


def writer(shadow: ClientHistory, seed: int, level: AckLevel | None = None) -> Writer:
    name = f"w{seed}"
    return Writer(
        name, Random(seed), shadow, node="n", deltas=60, burst=5, gap_s=0.02, level=level, poison=0.05
    )


def placed(record: LogHistory) -> dict[str, int]:
    """Each token's offset."""
    found = {}
    for offset, logged, row in record.rows():
        token = token_of(logged.batch, row)
        if token is not None:
            assert token not in found
            found[token] = offset
    return found


def check_told(record: LogHistory, shadow: ClientHistory) -> None:
    places = placed(record)
    for token, told in shadow.outcomes.items():
        if token.startswith(SUM):
            continue
        assert told.acks or told.refused or told.is_unknown
        if told.acks:
            assert {ack.offset for ack in told.acks} <= {places[token], None}
        elif told.refused:
            assert token not in places


@pytest.mark.parametrize("seed", SEEDS)
def test_embedded_writers_go_on_over_the_ends_of_their_process(seed: int) -> None:
    shadow, record = ClientHistory(), LogHistory("n")
    one = writer(shadow, seed)
    disk = SimDisk(seed)

    async def life(seed: int, before: str | None, limit_s: float) -> None:
        nonlocal disk
        world = virtual_world(seed, thread_delay_s_max=0.01, disk=disk)
        async with Propagator(data="x", log=LogSettings(), world=world) as p:
            record.start(p.internals().log, before)
            with anyio.move_on_after(limit_s) as scope:
                await one.run_embedded(p)
            if scope.cancelled_caught:
                disk.is_off = True
                disk = disk.kill()

    lives = 0
    while not one.is_done:
        try:
            run_virtual(life, seed + lives, "killed" if lives else None, 0.1 if lives < 4 else 300.0)
        except BaseException as error:  # what comes out of a process whose disk is off
            if not disk_is_off(error):
                raise
        lives += 1
    assert lives >= 2
    check_told(record, shadow)
    assert shadow.counts["acknowledged"] > 10


def disk_is_off(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(disk_is_off(one) for one in error.exceptions)
    return "off" in str(error) or type(error).__name__ == "SimCrash"


@pytest.mark.parametrize("seed", SEEDS)
def test_remote_writers_and_readers_go_on_over_broken_connections(seed: int) -> None:
    shadow, record = ClientHistory(), LogHistory("n")
    one = writer(shadow, seed)
    readers = [
        Reader("all", node="n"),
        Reader("some", node="n", topics="ns:b", group=True, batches=False),
    ]

    async def story(site: Site) -> None:
        record.start(site.propagator.internals().log, None)
        async with anyio.create_task_group() as tasks:
            for reader in readers:
                tasks.start_soon(reader.run_life, site.world, ADDRESS)
            lives = 0
            while not one.is_done:
                lives += 1
                with anyio.move_on_after(0.4 if lives < 5 else 100):
                    await one.run_remote(site.world, ADDRESS)
                site.network.reset()
            await anyio.sleep(5)
            tasks.cancel_scope.cancel()

    with_service(story, seed=seed, conditions=NetworkConditions(latency_s=0.002, jitter_s_max=0.01))
    check_told(record, shadow)
    rows = [(offset, logged.batch, row) for offset, logged, row in record.rows()]
    check_read(readers[0], {offset for offset, _, _ in rows})
    check_read(readers[1], {offset for offset, batch, row in rows if batch.namespaces[row] == "b"})


def check_read(reader: Reader, wanted: set[int]) -> None:
    assert {offset for reading in reader.sessions for offset, _ in reading.rows} == wanted
    for reading in reader.sessions:
        offsets = [offset for offset, _ in reading.rows]
        assert offsets == sorted(set(offsets))
