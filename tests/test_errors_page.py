"""The examples of docs/errors.md are the messages that the code formats today."""

from __future__ import annotations

import errno
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import anyio
import pytest

from delta_prop import AckLevel, Delta, Dot, Propagator, create, sparse
from delta_prop.calls import refusals as pipeline_refusals
from delta_prop.client.service_identity import granted_level
from delta_prop.delivery.reasons import sink_paused
from delta_prop.partition.ingest.epochs import fenced_by
from delta_prop.partition.ingest.fair_queue import FairQueue, Item
from delta_prop.partition.ingest.origins import Origins
from delta_prop.partition.order import missing
from delta_prop.partition.order.pending import Shortage
from delta_prop.server.answers import server_closing
from delta_prop.server.job_rules import already_decided, unknown_job
from delta_prop.server.limits import ConnectionLimiter
from delta_prop.server.partition_checks import check_named
from delta_prop.server.permissions import Unauthorized
from delta_prop.server.query_handler import unknown_request
from delta_prop.server.quotas import QuotaName, requests_exceeded
from delta_prop.server.start_offsets import check_in_log
from delta_prop_broker.catalogue.catalogue import Catalogue
from delta_prop_broker.log import refusals as log_refusals
from delta_prop_wire.codec import decode, encode
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import ProtocolError, Refused
from delta_prop_wire.frames import Ack, JobState, UnknownRequest
from delta_prop_wire.header import pack_header, unpack_header
from delta_prop_wire.spec import MAGIC, ErrorCode, Flag, FrameType
from delta_prop_wire.stamp import DEFAULT_LOG, LogName
from delta_prop_wire.topics import Topic

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_broker.log.contract import Log
    from delta_prop_wire.batch import Batch

PAGE = (Path(__file__).parent.parent / "docs" / "errors.md").read_text(encoding="utf-8")
ORIGIN = 0x09D55D665E700002  # origin of the producer "orders"
ID = bytes.fromhex("2f9eb5b874ef17a1c0a7bf87316e1091")
NOT_SENT = {"NOT_LEADER", "NO_QUORUM", "STALE_GENERATION", "STREAM_MOVED"}


def format_example(error: Refused | ProtocolError) -> str:
    """Return the text of an error, then one line per attribute that is set."""
    attributes = ("retry_after_ms", "row", "field", "details") if isinstance(error, Refused) else ()
    shown = [
        f"{name}: {getattr(error, name)!r}" for name in attributes if getattr(error, name) not in (None, {})
    ]
    return "\n".join([str(error), *shown]) + "\n"


def error_raised_by(call: Callable[[], object]) -> Refused | ProtocolError:
    with pytest.raises((Refused, ProtocolError)) as caught:
        call()
    assert isinstance(caught.value, Refused | ProtocolError)
    return caught.value


def embedded_refusal(refused_delta: Delta) -> Refused | ProtocolError:
    """Return the error with which a propagator refuses a delta that follows two others."""

    async def run() -> None:
        async with Propagator() as p:
            producer = p.producer("orders")
            await producer.publish(Delta("doc-1", create([0.1, 0.9, 0.0]), namespace="docs"))
            await producer.publish(Delta("doc-1", sparse([2], [0.4]), namespace="docs", id=ID))
            await producer.publish(refused_delta)

    return error_raised_by(partial(anyio.run, run))


def batch(base: int = 1, count: int = 1) -> Batch:
    deltas = [Delta("doc-1", create([1.0])) for _ in range(count)]
    return encode_batch(deltas, origin=ORIGIN, base=base)


def bad_checksum() -> object:
    raw = bytearray(encode(Ack(7)))
    raw[-1] ^= 1
    return decode(bytes(raw))


def full_queue() -> None:
    queue = FairQueue()
    for size in (4_096_000, 4096):
        queue.offer(Item(1, 100_000 if size > 4096 else 10, size), 0.0)


def too_many_connections() -> None:
    limiter = ConnectionLimiter(total_max=1000, per_host_max=64)
    for _ in range(65):
        limiter.enter("10.0.0.9")


def read_before_start() -> None:
    check_in_log(3, cast("Log", SimpleNamespace(start_offset=30)))


def pending_refusal(refuse: Callable[..., Refused], *arguments: object) -> Refused:
    dependencies = missing.MissingDependencies((missing.DotRange(ORIGIN, 4, 7),), ())
    return refuse(dependencies, *arguments)


def wrong_topic() -> Topic:
    return Topic.from_bytes(b"\x09red")


EXAMPLES: dict[str, Callable[[], object]] = {
    "BAD_FRAME": partial(unpack_header, b"GET / HTTP/1.1\r\n"),
    "UNSUPPORTED_VERSION": partial(unpack_header, bytes((MAGIC, 2)) + bytes(14)),
    "UNSUPPORTED_FLAG": partial(unpack_header, bytes((MAGIC, 1, FrameType.BATCH, 0x88)) + bytes(12)),
    "TOO_LARGE": partial(unpack_header, pack_header(FrameType.BATCH, Flag.BATCHED, 1, 20_000_000)),
    "CHECKSUM": bad_checksum,
    "UNAUTHORIZED": partial(Unauthorized, "the token has expired"),
    "UNKNOWN_TOPIC": wrong_topic,
    "QUEUE_FULL": full_queue,
    "RATE_LIMITED": too_many_connections,
    "DEP_TIMEOUT": partial(pending_refusal, missing.timed_out, 30.0, None),
    "FENCED": partial(fenced_by, ORIGIN, 6, 7),
    "CURSOR_TOO_OLD": read_before_start,
    "PROCESSING_FAILED": partial(sink_paused, "storage", 1200),
    "INVALID_DELTA": partial(embedded_refusal, Delta("doc-1", create([0.1, 0.9]), namespace="docs")),
    "SHUTTING_DOWN": server_closing,
    "DOT_REUSED": partial(pipeline_refusals.dot_reused, batch(), 7),
    "UNKNOWN_ORIGIN": partial(Origins().require, batch(), "orders"),
    "CONFLICT": partial(
        embedded_refusal, Delta("doc-1", sparse([2], [0.5]), namespace="docs", expect=Dot(ORIGIN, 1))
    ),
    "PENDING_FULL": partial(
        pending_refusal, missing.pending_full, Shortage("pending deltas of this producer", 1000, 1000)
    ),
    "LOG_FULL": partial(
        log_refusals.log_full,
        8_388_000,
        8_388_608,
        offsets=(1200, 9800),
        holder="storage",
        reason="",
    ),
    "LOG_FAILED": partial(log_refusals.log_stopped, OSError(errno.ENOSPC, "No space left on device")),
    "LEVEL_UNAVAILABLE": partial(granted_level, AckLevel.DURABLE, AckLevel.MEMORY),
    "OVERLAP": partial(pipeline_refusals.overlap, batch(3, 4), 4),
    "BAD_REQUEST": partial(unknown_request, UnknownRequest("compact", 1)),
    "UNKNOWN_JOB": partial(unknown_job, "nightly"),
    "JOB_DECIDED": partial(already_decided, "nightly", JobState.PUBLISHED),
    "ID_REUSED": partial(embedded_refusal, Delta("doc-1", sparse([2], [0.5]), namespace="docs", id=ID)),
    "OUTCOME_UNKNOWN": partial(pipeline_refusals.outcome_unknown, batch(2, 2)),
    "WRONG_PARTITION": partial(check_named, LogName(0, 3), ORIGIN, DEFAULT_LOG),
    "UNKNOWN_STREAM": partial(Catalogue().find, 7),
    "QUOTA_EXCEEDED": partial(requests_exceeded, QuotaName("token", "importer", "requests_s"), 10.0, 0.1),
}


def error_of(name: str) -> Refused | ProtocolError:
    try:
        error = EXAMPLES[name]()
    except (Refused, ProtocolError) as caught:
        error = caught
    assert isinstance(error, Refused | ProtocolError)
    return error


@pytest.mark.parametrize("code", ErrorCode)
def test_example_of_code_equals_the_message(code: ErrorCode) -> None:
    section = re.search(rf"^## {code.name}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert section
    example = section[1].partition("**Example.**")[2]
    if code.name in NOT_SENT:
        assert example.strip() == "None: no current server sends this code."
        return
    shown = re.match(r"\s*```text\n(.*?)```\s*\Z", example, re.DOTALL)
    assert shown
    assert shown[1] == format_example(error_of(code.name))


def test_only_reserved_codes_have_no_example() -> None:
    assert EXAMPLES.keys() | NOT_SENT == {code.name for code in ErrorCode}
