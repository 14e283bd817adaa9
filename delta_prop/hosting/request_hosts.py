"""The partitions of a data directory, as the worker that carries out operators' requests sees them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from delta_prop_broker.catalogue.store import place_of
from delta_prop_broker.catalogue.stream import check_partition
from delta_prop_broker.segments.identity import read_identity
from delta_prop_broker.segments.paths import IDENTITY
from delta_prop_wire.stamp import LogName

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from delta_prop.delivery.operator_requests import RequestPlace
    from delta_prop.delivery.request_executor import RequestExecutor
    from delta_prop.hosting.hosted_partition import HostedPartition
    from delta_prop.hosting.streams import Streams
    from delta_prop_broker.disk import Disk


class RequestHosts:
    """Finds and opens partitions for requests. Implements `RequestPartitions`."""

    def __init__(self, streams: Streams, open_ones: Mapping[LogName, HostedPartition], disk: Disk) -> None:
        """`open_ones`: the partitions that are open or opening; `disk`: the data directory."""
        self._streams = streams
        self._open_ones = open_ones
        self._disk = disk
        self._threads = streams.world.new_threads()

    def executors(self) -> Iterable[RequestExecutor]:
        executors = [partition.request_executor for partition in self._open_ones.values()]
        return [executor for executor in executors if executor is not None]

    def find_executor(self, place: RequestPlace) -> RequestExecutor | None:
        stream = self._streams.catalogue.streams.get(place.stream)
        if stream is None:
            return None
        partition = self._open_ones.get(LogName(stream.stream_id, place.partition))
        return None if partition is None else partition.request_executor

    def can_open(self, place: RequestPlace) -> bool:
        check_partition(self._streams.catalogue.require(place.stream), place.partition)
        return True

    async def read_log_id(self, place: RequestPlace) -> str | None:
        directory = place_of(self._streams.catalogue.require(place.stream), place.partition).log_path
        identity = await self._threads.run(partial(read_identity, self._disk, f"{directory}/{IDENTITY}"))
        return None if identity is None else identity.log_id.hex()

    async def open_for_requests(self, place: RequestPlace) -> None:
        stream = self._streams.catalogue.require(place.stream)
        await self._streams.open_partition(stream, place.partition)
        await self._streams.release(LogName(stream.stream_id, place.partition))
