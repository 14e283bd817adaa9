"""The replication sink against the contract, with a link that is none: another service as a list."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest

from delta_prop.testing import run_virtual
from delta_prop_sinks import ForwardSink, StopSink, TryAgain, check_sink
from delta_prop_wire.delta import Delta, create
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode
from tests.sinks.support import FakeLog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from delta_prop_wire.batch import LoggedBatch


class Elsewhere:
    """The other service: its batches by their first dot, and its next answer."""

    def __init__(self) -> None:
        self.batches: dict[tuple[int, int], bytes] = {}
        self.says: Refused | Exception | None = None
        self.has: dict[int, int] | None = None


class FalseLink:
    """Hands everything over at once; `elsewhere` decides."""

    def __init__(self, elsewhere: Elsewhere) -> None:
        self.elsewhere = elsewhere
        self.log_id = b""

    def begin(self, log_id: bytes) -> None:
        self.log_id = log_id

    async def run(self) -> None:
        await anyio.sleep_forever()

    async def wait_for_watermarks(self) -> Mapping[int, int] | None:
        await anyio.lowlevel.checkpoint()
        has, self.elsewhere.has = self.elsewhere.has, None
        return has

    async def forward(self, batches: Sequence[LoggedBatch]) -> list[Refused | None]:
        await anyio.lowlevel.checkpoint()
        told = self.elsewhere.says
        if told is not None and not isinstance(told, Refused):
            raise told
        for logged in batches[: len(batches) if told is None else 1]:
            self.elsewhere.batches[logged.batch.origin, logged.batch.base] = bytes(logged.batch.body)
        return [None, *[told] * (len(batches) - 1)]

    def statistics(self) -> object:
        return None


def forwarding(elsewhere: Elsewhere) -> ForwardSink:
    return ForwardSink(FalseLink(elsewhere))


def test_it_keeps_the_contract() -> None:
    elsewhere = Elsewhere()

    async def seen(_: Any) -> object:
        return sorted(elsewhere.batches.items())

    run_virtual(lambda: check_sink(lambda: forwarding(elsewhere), seen))


def deliver(elsewhere: Elsewhere, batches: int = 2, begin: int = 0) -> Callable[[], Any]:
    async def main() -> None:
        log = FakeLog()
        for number in range(batches):
            log.append(Delta(f"v{number}", create([1.0])))
        sink = forwarding(elsewhere)
        assert await sink.open(log) is None
        await sink.apply(log.deliveries(begin))

    return main


def test_bodies_go_as_they_are() -> None:
    elsewhere = Elsewhere()
    run_virtual(deliver(elsewhere))
    assert [base for _, base in elsewhere.batches] == [1, 2]


def test_what_is_refused_for_now_is_tried_again_from_there() -> None:
    elsewhere = Elsewhere()
    elsewhere.says = Refused(ErrorCode.LOG_FULL, "the log is full", retry_after_ms=50)
    with pytest.raises(TryAgain, match="the log is full") as caught:
        run_virtual(deliver(elsewhere))
    assert caught.value.done_offset == 1


def test_what_is_refused_for_good_stops_it_with_the_offset() -> None:
    elsewhere = Elsewhere()
    elsewhere.says = Refused(ErrorCode.BAD_REQUEST, "look at the service that gave it")
    with pytest.raises(StopSink, match=r"refuses offset 1: .*look at the service that gave it"):
        run_virtual(deliver(elsewhere))


def test_without_a_connection_it_is_tried_again() -> None:
    elsewhere = Elsewhere()
    elsewhere.says = None
    elsewhere.says = ConnectionError("it broke")  # type: ignore[assignment]
    with pytest.raises(TryAgain, match="it broke"):
        run_virtual(deliver(elsewhere))


def test_only_a_whole_log_is_forwarded() -> None:
    async def main() -> None:
        log = FakeLog()
        log.topics = frozenset({"ns:a"})  # type: ignore[misc]
        with pytest.raises(UsageError, match="attach it to all topics"):
            await forwarding(Elsewhere()).open(log)

    run_virtual(main)
