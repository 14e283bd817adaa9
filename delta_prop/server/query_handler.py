"""Answers the queries of clients about the service, offsets in its log, and facts."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import anyio

from delta_prop.server.partition_checks import check_stream_rights
from delta_prop.server.partitions import explain_open_failure
from delta_prop.server.start_offsets import resolve_start
from delta_prop.server.stream_requests import change, describe, describe_fully
from delta_prop_sinks.sink import VectorHolder
from delta_prop_wire.connection import REQUESTS_MAX
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Dot, namespace_of
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import (
    Describe,
    Fact,
    FactState,
    FindOffsets,
    FoundOffsets,
    Get,
    OriginGrant,
    Request,
    Response,
    StartAt,
    UnknownRequest,
    Welcome,
)
from delta_prop_wire.packing import pack
from delta_prop_wire.requests import PAGE_BYTES_MAX, known_requests
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.stamp import LogName
from delta_prop_wire.stream_requests import (
    AlterStream,
    CreateStream,
    DeleteStream,
    EraseVector,
    TruncateStream,
)
from delta_prop_wire.topics import ALL

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from delta_prop.api.transforms import VectorReader
    from delta_prop.delivery.sink_manager import SinkManager
    from delta_prop.server.answers import Answers
    from delta_prop.server.permissions import Permissions
    from delta_prop.server.server_context import ServerContext
    from delta_prop_broker.log.contract import Log

GET_TIMEOUT_S = 5.0
"""Seconds for which a query waits until the sink has applied all that is in the log."""
WATERMARKS_PER_PAGE = 1_024
_RETRY_MS = 1_000
_STARTS = frozenset({StartAt.EARLIEST, StartAt.LATEST, StartAt.TIME})


class QueryHandler:
    """Answers the queries of one connection. Call `start` first."""

    def __init__(self, context: ServerContext, answers: Answers) -> None:
        self.pending = 0
        """Queries without an answer yet."""
        self._context = context
        self._answers = answers
        self.tasks: TaskGroup
        """The tasks of the connection, in which queries wait."""

    def start(self, tasks: TaskGroup) -> None:
        """Answer queries that wait in tasks of this group."""
        self.tasks = tasks

    def handle(self, sequence: int, request: Request, permissions: Permissions | None) -> None:
        """Answer, at once or in a task. `permissions`: None before a hello. Raises Refused."""
        context = self._context
        match request:
            case Get():
                assert permissions is not None
                self._start(sequence, request, partial(get_fact, request, context, permissions))
            case FindOffsets():
                assert permissions is not None
                check_stream_rights(permissions, [request.stream], context.partitions.streams.catalogue)
                served = context.partitions.find(self._check_partition(request))
                if served is not None:
                    self._answers.respond(sequence, find_offsets(request, served.partition.log))
                else:
                    self._start(sequence, request, partial(self._find, request))
            case Describe(ranges=False):
                assert permissions is not None
                self._respond(sequence, describe(request, context, permissions))
            case Describe():
                assert permissions is not None
                self._start(sequence, request, partial(describe_fully, request, context, permissions))
            case CreateStream() | AlterStream() | DeleteStream() | TruncateStream() | EraseVector():
                assert permissions is not None
                self._start(sequence, request, partial(change, request, context, permissions))
            case UnknownRequest():
                raise unknown_request(request)

    def _start(
        self, sequence: int, request: Request, find_pages: Callable[[], Awaitable[Sequence[Response]]]
    ) -> None:
        """Answer in a task. Raises Refused (RATE_LIMITED)."""
        if self.pending >= REQUESTS_MAX:
            raise Refused(
                ErrorCode.RATE_LIMITED,
                f"{self.pending} queries of this connection wait for answers: wait for one, and send up to "
                f"{REQUESTS_MAX}",
                retry_after_ms=_RETRY_MS,
            )
        self.pending += 1
        self.tasks.start_soon(self._answer, sequence, request, find_pages)

    def _check_partition(self, request: FindOffsets) -> LogName:
        name = LogName(request.stream, request.partition)
        self._context.partitions.check(name)
        return name

    async def _find(self, request: FindOffsets) -> Sequence[Response]:
        name = self._check_partition(request)
        async with explain_open_failure(name):
            served = await self._context.partitions.open(name)
        return [find_offsets(request, served.partition.log)]

    async def _answer(
        self, sequence: int, request: Request, find_pages: Callable[[], Awaitable[Sequence[Response]]]
    ) -> None:
        try:
            pages = await find_pages()
        except Refused as refused:
            self._answers.refuse_request(sequence, request, refused)
        else:
            self._respond(sequence, pages)
        finally:
            self.pending -= 1

    def _respond(self, sequence: int, pages: Sequence[Response]) -> None:
        for number, page in enumerate(pages, 1):
            self._answers.respond(sequence, page, more=number < len(pages))


def make_welcomes(
    context: ServerContext, grants: Sequence[OriginGrant], permissions: Permissions
) -> list[Welcome]:
    """Return the pages of the answer to a hello; without the log if the token may not use its stream."""
    log, features, address = context.partition.log, tuple(context.features), context.settings.advertise
    may_use = permissions.can_use_stream(context.served.stream)
    end = Cursor(log.log_id, log.epoch, log.high_watermark) if may_use else None
    starts = range(0, max(len(grants), 1), WATERMARKS_PER_PAGE)
    highest = log.ack_level
    default = None if log.default_level is highest else log.default_level
    return [
        Welcome(features, tuple(grants[start : start + WATERMARKS_PER_PAGE]), end, highest, address, default)
        for start in starts
    ]


def unknown_request(request: UnknownRequest) -> Refused:
    """Return the refusal of a request whose name or version this service does not know."""
    known = known_requests()
    newest = known.get(request.name)
    if newest is None:
        return Refused(
            ErrorCode.BAD_REQUEST,
            f"request {request.name!r:.80}: unknown here: use one of {', '.join(known)}",
        )
    return Refused(
        ErrorCode.UNSUPPORTED_VERSION,
        f"request {request.name!r} of version {request.version}: too new: use {newest}, the newest here",
        details={"version": newest},
    )


def find_offsets(request: FindOffsets, log: Log) -> FoundOffsets:
    """Find the offsets of starts in a log. Raises Refused."""
    for start in request.starts:
        if start.kind not in _STARTS:
            raise Refused(
                ErrorCode.BAD_REQUEST, f"starts: {start.kind.value}: use earliest, latest or a time"
            )
    offsets = tuple([resolve_start(start, log) for start in request.starts])
    return FoundOffsets(offsets, Cursor(log.log_id, log.epoch, log.high_watermark))


async def get_fact(request: Get, context: ServerContext, permissions: Permissions) -> list[Fact]:
    """Return the pages of a fact as of the log's present high watermark.

    Raises Refused (UNAUTHORIZED; BAD_REQUEST if no sink stores states; RATE_LIMITED if that sink lags too
    far; PROCESSING_FAILED if it has quarantined a delta of the fact).
    """
    namespace = namespace_of(request.vector_id) if request.namespace is None else request.namespace
    permissions.check_stream(context.served.stream)
    permissions.check_read(namespace)
    sinks = context.served.sinks
    name, sink = _find_state_sink(sinks)
    offset = context.partition.log.high_watermark
    try:
        with anyio.fail_after(GET_TIMEOUT_S):
            await sinks.wait([name], offset, offset, committed=False)
    except TimeoutError:
        raise Refused(
            ErrorCode.RATE_LIMITED,
            f"sink {name!r} has not reached offset {offset} within {GET_TIMEOUT_S:g} s: try again",
            retry_after_ms=_RETRY_MS,
        ) from None
    held_offset = sinks.feed(name).quarantine.first_offset_of((namespace, request.vector_id))
    if held_offset is not None:
        raise Refused(
            ErrorCode.PROCESSING_FAILED,
            f"sink {name!r} has quarantined offset {held_offset}, a delta of this fact: replay or drop it",
            details={"offset": held_offset},
        )
    state = sink.get(namespace, request.vector_id)
    if inspect.isawaitable(state):
        state = await state
    return list(_paginate(state, offset))


def _find_state_sink(sinks: SinkManager) -> tuple[str, VectorReader]:
    """Return the first attached sink that holds the states of all facts, after its name. Raises Refused."""
    for name, runtime in sinks.runtimes.items():
        sink = runtime.sink
        if isinstance(sink, VectorHolder) and hasattr(sink, "get") and str(ALL) in runtime.context.topics:
            return name, cast("VectorReader", sink)
    raise Refused(
        ErrorCode.BAD_REQUEST,
        "get: no sink of this service stores the states of all facts: attach a storage sink to it",
    )


def _paginate(state: Any, offset: int) -> Iterator[Fact]:
    """Yield a state in pages, each small enough for a frame."""
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
    start = 0
    while start == 0 or start < max(map(len, parts)):
        yield Fact(kind, offset, dot, lamport, *[part[start : start + PAGE_BYTES_MAX] for part in parts])
        start += PAGE_BYTES_MAX
