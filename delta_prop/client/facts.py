"""Queries a service by blocking calls: for a fact, for offsets in the log, for its description.

Give a fact's dot as `expect` of the next delta; on CONFLICT, read the fact again and decide with its new
value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from delta_prop.client.partition_choice import (
    DEFAULT_STREAM,
    STREAM_BYTES_MAX,
    PartitionChoice,
    stream_with_id,
)
from delta_prop.client.request_client import RequestClient
from delta_prop.platform.ports import Tls
from delta_prop_wire.bounds import check_name
from delta_prop_wire.delta import namespace_of
from delta_prop_wire.errors import UsageError
from delta_prop_wire.frames import (
    Describe,
    Description,
    Fact,
    FactState,
    FindOffsets,
    FoundOffsets,
    Get,
    PartitionRange,
    Start,
    StartAt,
    StreamDescription,
)
from delta_prop_wire.murmur import partition_of
from delta_prop_wire.requests import STARTS_MAX
from delta_prop_wire.spec import COUNTER_MAX, NAMESPACE_BYTES_MAX, VECTOR_ID_BYTES_MAX
from delta_prop_wire.stamp import LogName

__all__ = [
    "Description",
    "Fact",
    "FactState",
    "PartitionRange",
    "StreamDescription",
    "describe",
    "find_offsets",
    "get",
]

_CLIENT_NAME = "asks"  # the name by which the service knows these clients
_FIX = "start the service or correct the address"


def get(
    addresses: str | Iterable[str],
    vector_id: str,
    namespace: str | None = None,
    *,
    stream: str | int = DEFAULT_STREAM,
    token: str | None = None,
    tls: Tls | None = None,
    timeout_s: float = 30.0,
) -> Fact:
    """Return the state of a fact, which includes every delta that was in the log at the time of the call.

    `namespace`: if absent, the text before the first `:` of the vector id, else `default`. `stream`: its name
    or id; the fact's partition follows from its name. Raises InvalidDelta for a name that no fact can have,
    Refused (BAD_REQUEST if no sink of the service stores the states of all facts), Unreachable, UsageError.
    """
    check_name("vector_id", vector_id, VECTOR_ID_BYTES_MAX)
    if namespace is not None:
        check_name("namespace", namespace, NAMESPACE_BYTES_MAX)
    client = RequestClient(_CLIENT_NAME, token, tls, timeout_s, _FIX)
    if stream != DEFAULT_STREAM:
        found = find_stream(addresses, stream, token=token, tls=tls, timeout_s=timeout_s)
        partition = partition_of(namespace or namespace_of(vector_id), vector_id, found.count)
        client = replace(client, log=LogName(found.stream, partition))
    response = client.ask(addresses, Get(vector_id, namespace))
    assert isinstance(response, Fact)
    return response


def find_offsets(
    addresses: str | Iterable[str],
    times_us: Iterable[int],
    *,
    stream: str | int = DEFAULT_STREAM,
    partition: int | None = None,
    token: str | None = None,
    tls: Tls | None = None,
    timeout_s: float = 30.0,
) -> FoundOffsets:
    """Return the offset of the first delta logged at or after each of up to 64 times (µs since 1970).

    `stream` (its name or id), `partition`: of the log; the partition may be left out if there is only one.
    Raises Refused (BAD_REQUEST if the log is in memory), Unreachable, UsageError.
    """
    if not isinstance(times_us, Iterable):
        raise UsageError(f"times_us {times_us!r:.40}: not a list: give a list of times")
    times = tuple(times_us)
    if len(times) > STARTS_MAX:
        raise UsageError(f"times_us: {len(times)} times: give up to {STARTS_MAX} in one call")
    for time_us in times:
        if type(time_us) is not int or not 0 <= time_us <= COUNTER_MAX:
            raise UsageError(
                f"times_us: {time_us!r:.40} is not a whole number from 0 to {COUNTER_MAX}: give microseconds"
            )
    starts = tuple(Start(StartAt.TIME, time_us) for time_us in times)
    choice = PartitionChoice(stream, partition)
    log = choice.known
    if log is None:
        log = choice.resolve(find_stream(addresses, str(stream), token=token, tls=tls, timeout_s=timeout_s))
    response = RequestClient(_CLIENT_NAME, token, tls, timeout_s, _FIX).ask(
        addresses, FindOffsets(starts, *log)
    )
    assert isinstance(response, FoundOffsets)
    return response


def describe(
    addresses: str | Iterable[str],
    stream: str | None = None,
    *,
    ranges: bool = False,
    token: str | None = None,
    tls: Tls | None = None,
    timeout_s: float = 30.0,
) -> Description:
    """Describe a service: its streams, where their logs begin and end, the requests that it supports.

    `stream`: describe only this one. `ranges`: list all its partitions that were ever used, also closed ones;
    the others are empty. Otherwise only open ones are listed.
    Raises Refused (UNKNOWN_STREAM), Unreachable, UsageError.
    """
    if stream is not None:
        check_name("stream", stream, STREAM_BYTES_MAX)
    response = RequestClient(_CLIENT_NAME, token, tls, timeout_s, _FIX).ask(
        addresses, Describe(stream, ranges)
    )
    assert isinstance(response, Description)
    return response


def find_stream(
    addresses: str | Iterable[str],
    stream: str | int,
    *,
    token: str | None = None,
    tls: Tls | None = None,
    timeout_s: float = 30.0,
) -> StreamDescription:
    """Describe one stream of a service, by its name or id.

    Raises Refused (UNKNOWN_STREAM), Unreachable, UsageError.
    """
    if isinstance(stream, str):
        return describe(addresses, stream, token=token, tls=tls, timeout_s=timeout_s).streams[0]
    return stream_with_id(describe(addresses, token=token, tls=tls, timeout_s=timeout_s).streams, stream)
