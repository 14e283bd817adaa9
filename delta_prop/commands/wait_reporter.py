"""Reports on standard error why a command waits: first after 3 s without progress, then every 30 s."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import anyio

from delta_prop.client import StreamSubscriber, Subscriber, outage
from delta_prop.platform import system
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.client.reconnecting_link import ReconnectingLink

REPORT_AFTER_S = 3.0
"""Seconds without progress after which a wait is reported."""
REPORT_INTERVAL_S = 30.0
"""Seconds between reports of the same wait."""
NO_PORT = "no answer has come yet: check that HOST:PORT is the one that `serve` prints as port=…"
NO_HTTP_PORT = "no answer has come yet: check that HOST:PORT is the one that `serve` prints as http=…"
_POLL_S = 0.25


class WaitReporter:
    """Reports why a command waits.

    Its owner sets `get_cause`, which returns the obstacle (None: unknown), and `is_waiting`, which returns
    True while the command waits. `get_details` returns what to print after a known obstacle. `unknown_text`:
    what to print for an unknown obstacle.
    """

    def __init__(self, unknown_text: str = "no answer has come yet") -> None:
        self.get_cause: Callable[[], Exception | None] = lambda: None
        self.is_waiting: Callable[[], bool] = lambda: True
        self.get_details: Callable[[], str] = str
        self._unknown_text = unknown_text
        self._since = system.now()
        self._reported_kind: str | None = None
        self._reported_at = 0.0

    def note_progress(self) -> None:
        """Note that the wait is over; report it if the wait was reported."""
        now = system.now()
        if self._reported_kind is not None:
            system.note(f"goes on after {now - self._since:.0f} s")
            self._reported_kind = None
        self._since = now

    @asynccontextmanager
    async def report(self) -> AsyncIterator[None]:
        """Report waits until the block ends."""
        failure: BaseException | None = None
        with _mute_client_warning():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._run)
                try:
                    yield
                except (Exception, KeyboardInterrupt) as error:  # a task group would wrap it
                    failure = error
                tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    @contextmanager
    def report_in_thread(self) -> Iterator[None]:
        """Report waits of blocking code; `get_cause` and `is_waiting` are called in another thread."""
        with _mute_client_warning(), system.call_periodically(lambda: self._poll(system.now()), _POLL_S):
            yield

    async def _run(self) -> None:
        while True:
            await anyio.sleep(_POLL_S)
            self._poll(system.now())

    def _poll(self, now: float) -> None:
        if not self.is_waiting():
            self.note_progress()
            return
        if now - self._since < REPORT_AFTER_S:
            return
        cause = self.get_cause()
        if cause is None and self._reported_kind is not None:  # a retry is under way
            return
        kind = cause.code.name if isinstance(cause, Refused) else type(cause).__name__
        if kind != self._reported_kind or now - self._reported_at >= REPORT_INTERVAL_S:
            self._reported_kind, self._reported_at = kind, now
            system.note(f"waiting, no answer for {now - self._since:.0f} s: {self._format_cause(cause)}")

    def _format_cause(self, cause: Exception | None) -> str:
        if cause is None:
            return self._unknown_text
        if isinstance(cause, Refused):
            return f"{cause}{self.get_details()}"
        return f"no connection ({str(cause) or type(cause).__name__}), retrying{self.get_details()}"


def report_lookup(wait_reporter: WaitReporter) -> Callable[[ReconnectingLink], None]:
    """Return what makes the reporter name the obstacle of a lookup, given the lookup's link."""

    def note_link(link: ReconnectingLink) -> None:
        wait_reporter.get_cause = lambda: link.cause

    return note_link


@contextmanager
def _mute_client_warning() -> Iterator[None]:
    """Suppress the client's own warning, since the wait reporter prints the same."""
    was_disabled, outage.logger.disabled = outage.logger.disabled, True
    try:
        yield
    finally:
        outage.logger.disabled = was_disabled


@asynccontextmanager
async def report_subscriber_waits(subscriber: Subscriber | StreamSubscriber) -> AsyncIterator[None]:
    """Report why a subscriber has no connection, until the block ends."""
    wait_reporter = WaitReporter(NO_PORT)
    wait_reporter.get_cause = lambda: subscriber.waits_for
    wait_reporter.is_waiting = lambda: not subscriber.started or subscriber.waits_for is not None
    if isinstance(subscriber, StreamSubscriber):
        wait_reporter.get_details = lambda: _details_of(subscriber)
    async with wait_reporter.report():
        yield


def _details_of(subscriber: StreamSubscriber) -> str:
    """Return how many partitions have no connection, and what helps if the service refuses more."""
    unconnected = len(subscriber.unconnected)
    details = f"; no connection to {unconnected} of {len(subscriber.assigned)} partitions"
    cause = subscriber.waits_for
    if isinstance(cause, Refused) and cause.code is ErrorCode.RATE_LIMITED:
        details += ": raise connections_per_host_max of the service, or read one partition with --partition"
    return details
