"""Identity of producers: ids, counters of each partition, and the fencing of an older instance."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, product
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop import LogSettings, Propagator
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import Delta, Dot, opaque, origin_partition, producer_id_of
from delta_prop_wire.errors import Refused
from delta_prop_wire.murmur import partition_of
from delta_prop_wire.spec import PRODUCER_ID_BITS, ErrorCode
from tests.delta_prop.client.virtual_streams import StreamSite, with_streams

if TYPE_CHECKING:
    from delta_prop.client.partitioning import StreamPublished

SMALL = LogSettings(free_bytes_min=0, reserve_bytes=0)


def key_at(partition: int) -> str:
    return next(f"k{n}" for n in range(100) if partition_of("default", f"k{n}", 3) == partition)


KEYS = [key_at(partition) for partition in range(3)]


def make_delta(key: str) -> Delta:
    return Delta(key, opaque(key.encode()))


def dots(published: StreamPublished) -> list[tuple[int, int]]:
    """Return partition and counter of each part's last delta."""
    found = [part.ack.dot for part in published.parts]
    return [(origin_partition(dot.origin), dot.counter) for dot in found if isinstance(dot, Dot)]


def test_names_and_streams_have_producer_ids_of_their_own() -> None:
    names, streams = [f"producer-{number}" for number in range(5_000)], range(4)
    ids = {producer_id_of(name, stream) for name, stream in product(names, streams)}
    assert len(ids) == len(names) * len(streams)
    assert max(ids) < 1 << PRODUCER_ID_BITS
    assert producer_id_of("producer-1") == producer_id_of("producer-1", 0), "a restart finds its id again"


def test_service_draws_another_producer_id_at_each_start() -> None:
    async def main() -> None:
        disk, origins = SimDisk(1), []
        for start in range(3):
            world = virtual_world(start, disk=disk)
            async with Propagator(data="data", log=SMALL, world=world) as p:
                acks = [await p.publish(make_delta(f"v{start}-{n}")) for n in range(2)]
                found = [ack.dot for ack in acks if isinstance(ack.dot, Dot)]
                assert [dot.counter for dot in found] == [1, 2]
                origins.append(found[0].origin)
        assert len(set(origins)) == 3

    run_virtual(main)


def test_each_partition_counts_the_deltas_of_a_producer_from_one() -> None:
    async def scenario(site: StreamSite) -> None:
        async with site.producer() as p:
            for number in range(1, 4):
                for partition, key in enumerate(KEYS):
                    ack = await p.publish(make_delta(key))
                    assert dots(ack) == [(partition, number)]
                    assert not ack.parts[0].ack.duplicate, "counters of other partitions are no duplicates"
        assert site.logged_keys() == [[key] * 3 for key in KEYS]

    with_streams(scenario)


def test_second_instance_of_a_name_fences_the_first_in_each_partition() -> None:
    async def scenario(site: StreamSite) -> None:
        async with site.producer() as zombie:
            await zombie.publish(*map(make_delta, KEYS))
            async with site.producer() as second:
                for partition, key in enumerate(KEYS):
                    with pytest.raises(Refused) as refused:
                        await zombie.publish(make_delta(key))
                    assert refused.value.code is ErrorCode.FENCED
                    assert not refused.value.retryable
                    assert dots(await second.publish(make_delta(key))) == [(partition, 2)]
                with pytest.raises(Refused, match="FENCED"):
                    zombie.offer(make_delta(KEYS[0]), partition="sticky")
        assert site.logged_keys() == [[key] * 2 for key in KEYS]

    with_streams(scenario)


def test_paused_instance_is_fenced_with_what_it_had_in_flight() -> None:
    async def scenario(site: StreamSite) -> None:
        async with site.producer() as zombie:
            await zombie.publish(*map(make_delta, KEYS))
            site.network.cut("client", "server")  # its batches wait in the network, as of a paused process
            receipt = zombie.offer(*map(make_delta, KEYS))
            await anyio.sleep(1)
            other_world = replace(site.world, network=site.network.at("another client"))
            async with site.producer(world=other_world) as second:
                await second.publish(*map(make_delta, KEYS))
            site.network.heal("client", "server")
            with pytest.raises(Refused) as refused:
                await receipt
            assert refused.value.code is ErrorCode.FENCED
        assert list(chain(*site.logged_keys())) == [key for key in KEYS for _ in range(2)]

    with_streams(scenario)
