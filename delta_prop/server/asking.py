"""Answers what clients ask: what the service is, where in its log something lies, what a fact is."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, cast

import anyio

from delta_prop.server.partitions import DEFAULT_STREAM, PARTITION, STREAM_ID, check_partition
from delta_prop.server.starts import offset_of
from delta_prop_sinks.sink import HoldsVectors
from delta_prop_wire.connection import REQUESTS_MAX
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Dot, namespace_of
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import (
    Describe,
    Description,
    Fact,
    FactState,
    FindOffsets,
    FoundOffsets,
    Get,
    PartitionRange,
    StartAt,
    StreamDescription,
    UnknownRequest,
    Welcome,
)
from delta_prop_wire.packing import pack
from delta_prop_wire.requests import PAGE_BYTES_MAX, known_requests
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.topics import ALL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from anyio.abc import TaskGroup

    from delta_prop.inside import Inside
    from delta_prop.server.grants import Grant
    from delta_prop.server.hub import Hub
    from delta_prop.transforms import VectorReader
    from delta_prop_wire.frames import OriginGrant, Request

GET_S_MAX = 5.0
"""So long a question waits until the sink that is asked has applied all that is in the log."""
WATERMARKS_A_PAGE = 1_024
_RETRY_MS = 1_000
_STARTS = frozenset({StartAt.EARLIEST, StartAt.LATEST, StartAt.TIME})


class Questions:
    """Answers the questions of one connection, by `respond` and `refuse` with the number of the request."""

    def __init__(
        self,
        hub: Hub,
        respond: Callable[..., None],
        refuse: Callable[[int, Request, Refused], None],
    ) -> None:
        self.waiting = 0
        """Questions without an answer yet."""
        self._hub = hub
        self._respond = respond
        self._refuse = refuse

    def ask(self, sequence: int, asked: Request, grant: Grant | None, tasks: TaskGroup) -> None:
        """Answer, at once or in a task. `grant`: None before a hello. Raises Refused."""
        match asked:
            case Get():
                assert grant is not None
                self._check_room()
                self.waiting += 1
                tasks.start_soon(self._get, sequence, asked, grant)
            case FindOffsets():
                self._respond(sequence, find_offsets(asked, self._hub.inside))
            case Describe():
                self._respond(sequence, describe(self._hub))
            case UnknownRequest():
                raise unknown_request(asked)

    def _check_room(self) -> None:
        if self.waiting >= REQUESTS_MAX:
            raise Refused(
                ErrorCode.RATE_LIMITED,
                f"{self.waiting} questions of this connection wait, allowed are {REQUESTS_MAX}: wait for an "
                "answer",
                retry_after_ms=_RETRY_MS,
            )

    async def _get(self, sequence: int, asked: Get, grant: Grant) -> None:
        try:
            pages = await get(asked, self._hub.inside, grant)
        except Refused as refused:
            self._refuse(sequence, asked, refused)
        else:
            for number, page in enumerate(pages, 1):
                self._respond(sequence, page, more=number < len(pages))
        finally:
            self.waiting -= 1


def welcomes(hub: Hub, granted: Sequence[OriginGrant]) -> list[Welcome]:
    """Make the answer to a hello, in pages."""
    log, features = hub.inside.log, tuple(hub.features)
    end = Cursor(log.log_id, log.epoch, log.visible)
    firsts = range(0, max(len(granted), 1), WATERMARKS_A_PAGE)
    return [
        Welcome(features, tuple(granted[first : first + WATERMARKS_A_PAGE]), end, log.level)
        for first in firsts
    ]


def describe(hub: Hub) -> Description:
    """Describe the service: its one stream, and the requests that it knows."""
    log = hub.inside.log
    end = Cursor(log.log_id, log.epoch, log.visible)
    stream = StreamDescription(DEFAULT_STREAM, STREAM_ID, (PartitionRange(PARTITION, log.first_offset, end),))
    return Description((stream,), known_requests(), tuple(hub.features), log.level)


def unknown_request(asked: UnknownRequest) -> Refused:
    """Make the refusal of what only a newer client may ask."""
    known = known_requests()
    newest = known.get(asked.name)
    if newest is None:
        return Refused(
            ErrorCode.BAD_REQUEST,
            f"request {asked.name!r:.80} is not known here: ask for one of {', '.join(known)}",
        )
    return Refused(
        ErrorCode.UNSUPPORTED_VERSION,
        f"request {asked.name!r} of version {asked.version}: the newest here is {newest}: use that",
        details={"version": newest},
    )


def find_offsets(asked: FindOffsets, inside: Inside) -> FoundOffsets:
    """Find the offsets of these starts in the log. Raises Refused."""
    check_partition(asked.stream, asked.partition)
    log = inside.log
    for start in asked.starts:
        if start.at not in _STARTS:
            raise Refused(
                ErrorCode.BAD_REQUEST, f"starts: {start.at.value}: ask for earliest, latest or a time"
            )
    offsets = tuple([offset_of(start, log) for start in asked.starts])
    return FoundOffsets(offsets, Cursor(log.log_id, log.epoch, log.visible))


async def get(asked: Get, inside: Inside, grant: Grant) -> list[Fact]:
    """A fact with all that is in the log by now, in pages. Raises Refused (UNAUTHORIZED, BAD_REQUEST where no
    sink keeps states, RATE_LIMITED where that is too far behind, PROCESSING_FAILED where it has set aside a
    delta of the fact).
    """
    namespace = namespace_of(asked.vector_id) if asked.namespace is None else asked.namespace
    grant.check_read(namespace)
    name, sink = _reader(inside)
    offset = inside.log.visible
    try:
        with anyio.fail_after(GET_S_MAX):
            await inside.sinks.wait([name], offset, offset, committed=False)
    except TimeoutError:
        raise Refused(
            ErrorCode.RATE_LIMITED,
            f"sink {name!r} has not come to offset {offset} in {GET_S_MAX:g} s: ask again",
            retry_after_ms=_RETRY_MS,
        ) from None
    held = inside.sinks.feed(name).quarantine.first_of((namespace, asked.vector_id))
    if held is not None:
        raise Refused(
            ErrorCode.PROCESSING_FAILED,
            f"sink {name!r} has set aside offset {held}, a delta of this fact: replay or drop it there",
            details={"offset": held},
        )
    state = sink.get(namespace, asked.vector_id)
    if inspect.isawaitable(state):
        state = await state
    return list(_pages(state, offset))


def _reader(inside: Inside) -> tuple[str, VectorReader]:
    """The first attached sink that holds the states of all facts."""
    for name, attached in inside.sinks.attached.items():
        sink = attached.sink
        if isinstance(sink, HoldsVectors) and hasattr(sink, "get") and str(ALL) in attached.topics:
            return name, cast("VectorReader", sink)
    raise Refused(
        ErrorCode.BAD_REQUEST,
        "get: no sink of this service keeps the states of all facts: attach a storage sink to it",
    )


def _pages(state: Any, offset: int) -> Iterator[Fact]:
    """A state, cut so that each part of a page is small enough for a frame."""
    key = None if state is None else state.key
    if key is None:
        yield Fact(FactState.ABSENT, offset)
        return
    vector, data = state.vector, state.data
    kind = FactState.DELETED
    if state.alive:
        kind = FactState.OPAQUE if vector is None else FactState.VECTOR
    dot, lamport = Dot(key[1], key[2]), key[0]
    values = b"" if vector is None else vector.astype("<f4", copy=False).tobytes()
    parts = values, data or b"", pack(dict(state.metadata)) if state.metadata else b""
    at = 0
    while at == 0 or at < max(map(len, parts)):
        yield Fact(kind, offset, dot, lamport, *[part[at : at + PAGE_BYTES_MAX] for part in parts])
        at += PAGE_BYTES_MAX
