"""ForwardSink keeps the contract, over a fake link to another service, which records its batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest

from delta_prop.testing import run_virtual
from delta_prop_sinks import ForwardSink, StopSink, TryAgain, check_sink
from delta_prop_wire.delta import Delta, create, opaque
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode
from tests.sinks.support import LOCAL_ORIGIN, FakeLog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from delta_prop_wire.batch import LoggedBatch


class OtherService:
    """The other service: holds its batches by their first dot, and its answer to all calls."""

    def __init__(self) -> None:
        self.batches: dict[tuple[int, int], bytes] = {}
        self.answer: Refused | Exception | None = None
        self.watermarks: dict[int, int] | None = None


class FakeLink:
    """Delivers everything at once; `service` decides the answer."""

    def __init__(self, service: OtherService) -> None:
        self.service = service
        self.log_id = b""

    def begin(self, log_id: bytes) -> None:
        self.log_id = log_id

    async def run(self) -> None:
        await anyio.sleep_forever()

    async def wait_for_watermarks(self) -> Mapping[int, int] | None:
        await anyio.lowlevel.checkpoint()
        watermarks, self.service.watermarks = self.service.watermarks, None
        return watermarks

    async def forward(self, batches: Sequence[LoggedBatch]) -> list[Refused | None]:
        await anyio.lowlevel.checkpoint()
        answer = self.service.answer
        if answer is not None and not isinstance(answer, Refused):
            raise answer
        for logged in batches[: len(batches) if answer is None else 1]:
            self.service.batches[logged.batch.origin, logged.batch.base] = bytes(logged.batch.body)
        return [None, *[answer] * (len(batches) - 1)]

    def statistics(self) -> object:
        return None


def forward_sink(service: OtherService) -> ForwardSink:
    return ForwardSink(FakeLink(service))


def test_forward_sink_follows_the_contract() -> None:
    service = OtherService()

    async def probe(_: Any) -> object:
        return sorted(service.batches.items())

    run_virtual(lambda: check_sink(lambda: forward_sink(service), probe))


def filled_log() -> FakeLog:
    log = FakeLog()
    log.append(Delta("v0", create([1.0]), metadata={"n": 0}), Delta("v1", create([2.0])))
    log.append(Delta("v0", opaque(b"bytes")))
    return log


def delivery_to(service: OtherService) -> Callable[[], Any]:
    """Return a main function that forwards the filled log to a service."""

    async def main() -> None:
        log = filled_log()
        sink = forward_sink(service)
        assert await sink.open(log) is None
        await sink.apply(log.deliveries())

    return main


def test_each_batch_is_forwarded_unchanged_and_in_order() -> None:
    service, log = OtherService(), filled_log()
    run_virtual(delivery_to(service))
    assert list(service.batches) == [(LOCAL_ORIGIN, 1), (LOCAL_ORIGIN, 3)]
    assert list(service.batches.values()) == [bytes(logged.batch.body) for logged in log.batches]


def test_retryable_refusal_resumes_at_refused_batch() -> None:
    service = OtherService()
    service.answer = Refused(ErrorCode.LOG_FULL, "the log is full", retry_after_ms=50)
    with pytest.raises(TryAgain, match="the log is full") as caught:
        run_virtual(delivery_to(service))
    assert caught.value.done_offset == 2


def test_final_refusal_stops_sink_and_names_offset() -> None:
    service = OtherService()
    service.answer = Refused(ErrorCode.BAD_REQUEST, "look at the service that gave it")
    with pytest.raises(StopSink, match=r"refuses offset 2: .*look at the service that gave it"):
        run_virtual(delivery_to(service))


def test_lost_connection_is_retried() -> None:
    async def main() -> None:
        service, log = OtherService(), filled_log()
        sink = forward_sink(service)
        await sink.open(log)
        service.answer = ConnectionError("it broke")
        with pytest.raises(TryAgain, match="not connected to the other service: it broke") as caught:
            await sink.apply(log.deliveries())
        assert caught.value.done_offset is None
        assert (service.batches, sink.statistics().forwarded) == ({}, 0)
        service.answer = None
        await sink.apply(log.deliveries())
        assert (len(service.batches), sink.statistics().forwarded) == (2, 3)

    run_virtual(main)


def test_forwarding_only_some_topics_is_refused() -> None:
    async def main() -> None:
        log = FakeLog()
        log.topics = frozenset({"ns:a"})  # type: ignore[misc]
        with pytest.raises(UsageError, match="attach it to all topics"):
            await forward_sink(OtherService()).open(log)

    run_virtual(main)
