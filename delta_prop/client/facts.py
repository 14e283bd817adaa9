"""Queries a service by blocking calls: for a fact, for offsets in the log, for its description.

Give a fact's dot as `expect` of the next delta; on CONFLICT, read the fact again and decide with its new
value.
"""

from __future__ import annotations

from collections.abc import Iterable

from delta_prop.client.request_client import RequestClient
from delta_prop.platform.ports import Tls
from delta_prop_wire.bounds import check_name
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
from delta_prop_wire.requests import STARTS_MAX
from delta_prop_wire.spec import COUNTER_MAX, NAMESPACE_BYTES_MAX, VECTOR_ID_BYTES_MAX

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
    token: str | None = None,
    tls: Tls | None = None,
    timeout_s: float = 30.0,
) -> Fact:
    """Return the state of a fact, which includes every delta that was in the log at the time of the call.

    `namespace`: if absent, the text before the first `:` of the vector id, else `default`.
    Raises InvalidDelta for a name that no fact can have, Refused (BAD_REQUEST if no sink of the service
    stores the states of all facts), Unreachable, UsageError.
    """
    check_name("vector_id", vector_id, VECTOR_ID_BYTES_MAX)
    if namespace is not None:
        check_name("namespace", namespace, NAMESPACE_BYTES_MAX)
    response = RequestClient(_CLIENT_NAME, token, tls, timeout_s, _FIX).ask(
        addresses, Get(vector_id, namespace)
    )
    assert isinstance(response, Fact)
    return response


def find_offsets(
    addresses: str | Iterable[str],
    times_us: Iterable[int],
    *,
    token: str | None = None,
    tls: Tls | None = None,
    timeout_s: float = 30.0,
) -> FoundOffsets:
    """Return the offset of the first delta logged at or after each of up to 64 times (µs since 1970).

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
    response = RequestClient(_CLIENT_NAME, token, tls, timeout_s, _FIX).ask(addresses, FindOffsets(starts))
    assert isinstance(response, FoundOffsets)
    return response


def describe(
    addresses: str | Iterable[str],
    *,
    token: str | None = None,
    tls: Tls | None = None,
    timeout_s: float = 30.0,
) -> Description:
    """Describe a service: its streams, where their logs begin and end, the requests that it supports.

    Raises Refused, Unreachable, UsageError.
    """
    response = RequestClient(_CLIENT_NAME, token, tls, timeout_s, _FIX).ask(addresses, Describe())
    assert isinstance(response, Description)
    return response
