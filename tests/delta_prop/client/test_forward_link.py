"""ForwardLink without a network: a call ends when the other service has all of its batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop import Delta, opaque
from delta_prop.client.errors import Reconnect
from delta_prop.client.forwarding import ForwardLink
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import Source
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.frames import Ack, AckRange, Nack, OriginGrant, Welcome
from delta_prop_wire.spec import UNKNOWN_OFFSET, ErrorCode

if TYPE_CHECKING:
    from delta_prop_wire.frames import BatchFrame

STORED_ORIGIN, NEW_ORIGIN = 1 << 20, 2 << 20


class Session:
    """A session whose credit is spent by one frame."""

    def __init__(self) -> None:
        self.sent: list[BatchFrame] = []
        self.connection: Any = SimpleNamespace(send_window=SimpleNamespace(is_open=True), send=self._send)

    def _send(self, frame: BatchFrame) -> bytes:
        self.sent.append(frame)
        self.connection.send_window.is_open = False
        return b"frame"


def make_logged(origin: int, offset: int) -> LoggedBatch:
    return LoggedBatch(
        encode_batch([Delta("v", opaque(b"x"))], origin=origin, base=1), offset, 1 + offset, Source.LOCAL
    )


def test_rest_of_a_call_that_is_already_stored_is_not_sent() -> None:
    async def main() -> None:
        link, session = ForwardLink("service:7373", world=virtual_world(1)), Session()
        link.on_welcome(Welcome(origins=(OriginGrant(STORED_ORIGIN, 1, 9),)), same_address=True)
        outcomes: list[object] = []

        async def forward() -> None:
            outcomes.extend(await link.forward([make_logged(NEW_ORIGIN, 0), make_logged(STORED_ORIGIN, 1)]))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(forward)
            await anyio.sleep(0.1)
            assert link.data_to_send(session, 0.0)  # type: ignore[arg-type]
            link.on_frame(Ack(session.sent[0].sequence), 0, 0.0)
            session.connection.send_window.is_open = True
            assert not link.data_to_send(session, 0.0)  # type: ignore[arg-type]
            with anyio.fail_after(1):
                while not outcomes:  # noqa: ASYNC110 - no event signals the return of a call
                    await anyio.sleep(0.01)
        assert outcomes == [None, None]
        assert len(session.sent) == 1

    run_virtual(main)


def test_ack_of_an_earlier_send_does_not_settle_a_later_one() -> None:
    """The first send was refused and the batch is resent; a late answer refers to the first send."""

    async def main() -> None:
        link, session = ForwardLink("service:7373", world=virtual_world(1)), Session()
        link.on_welcome(Welcome(), same_address=True)
        batches, outcomes = [make_logged(NEW_ORIGIN, 0)], []
        for is_retry in (False, True):
            async with anyio.create_task_group() as tasks:

                async def forward() -> None:
                    outcomes.append(await link.forward(batches))

                tasks.start_soon(forward)
                await anyio.sleep(0.1)
                session.connection.send_window.is_open = True
                assert link.data_to_send(session, 0.0)  # type: ignore[arg-type]
                first, last = session.sent[0].sequence, session.sent[-1].sequence
                if is_retry:
                    link.on_frame(Ack(first), 0, 0.0)
                link.on_frame(Nack(last, ErrorCode.LOG_FULL, "the log is full"), 0, 0.0)
        assert [one.code for (one,) in outcomes] == [ErrorCode.LOG_FULL] * 2

    run_virtual(main)


def test_duplicate_at_unknown_offset_needs_a_watermark() -> None:
    async def main() -> None:
        link, session = ForwardLink("service:7373", world=virtual_world(1)), Session()
        batches = [make_logged(STORED_ORIGIN, 0), make_logged(NEW_ORIGIN, 1)]

        async def forward() -> None:
            with pytest.raises(ConnectionError):
                await link.forward(batches)

        link.on_welcome(Welcome(), same_address=True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(forward)
            await anyio.sleep(0.1)
            for _ in batches:
                assert link.data_to_send(session, 0.0)  # type: ignore[arg-type]
                session.connection.send_window.is_open = True
            first, second = (frame.sequence for frame in session.sent)
            ranges = (AckRange(first, first, 7, True), AckRange(second, second, UNKNOWN_OFFSET, True))
            with pytest.raises(Reconnect):
                link.on_frame(Ack(second, ranges=ranges), 0, 0.0)
            link.on_disconnect()
        link.on_welcome(
            Welcome(origins=(OriginGrant(NEW_ORIGIN, 1, 1), OriginGrant(STORED_ORIGIN, 1, 1))),
            same_address=True,
        )
        assert await link.forward(batches) == [None, None]
        assert len(session.sent) == 2

    run_virtual(main)
