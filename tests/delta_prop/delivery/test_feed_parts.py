"""The parts of a feed, each by itself: inbox, cursor, rebuild, requests; and the store of the cursors."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from delta_prop import Settings
from delta_prop.delivery.cursors import AttachedCursor, CursorStore
from delta_prop.delivery.feed_state import FeedEvent, FeedStatus, PendingRebuild
from delta_prop.delivery.inbox import Inbox
from delta_prop.delivery.redelivery import ReplayQueue, ReplayRequest
from delta_prop.delivery.routing_table import RoutingTable
from delta_prop.delivery.sink_cursor import SinkCursor
from delta_prop.delivery.status import RebuildProgress, SavedCursor
from delta_prop.partition.partition import Partition
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.topics import Topic
from tests.delta_prop.delivery.support import LIMITS, SMALL_LIMITS, Route, TinySink


class Parts:
    """A log, a status, an inbox and a cursor, without a feed; it counts the notifications."""

    def __init__(self, *, start: int = 0, has_own: bool = False, batches: int = 0) -> None:
        self.route = Route()
        for _ in range(batches):
            self.route.publish("a")
        self.status = FeedStatus()
        self.inbox = Inbox(self.route.log, self.route.world.clock, SMALL_LIMITS, start)
        self.cursor = SinkCursor(
            self.route.log, self.status, self.inbox, self.route, start=start, reported=0, has_own=has_own
        )


def test_inbox_reads_what_its_mailbox_did_not_take() -> None:
    async def main() -> None:
        parts = Parts()
        inbox, pushed = parts.inbox, 0
        assert not inbox.is_catching_up
        while inbox.push(parts.route.publish("a"), None):
            pushed += 1
        assert pushed == SMALL_LIMITS.mailbox_deltas_max
        assert (inbox.mailbox.delta_count, inbox.end) == (pushed, pushed)
        table: RoutingTable[Any] = RoutingTable()
        table.subscribe(inbox, [Topic.parse("*")])
        deliveries = await inbox.read(inbox, table, 10)  # type: ignore[arg-type]
        assert deliveries is not None
        assert [delivery.first_offset for delivery in deliveries] == [pushed]
        assert (inbox.end, inbox.is_catching_up) == (pushed + 1, False)
        inbox.reread(3)
        assert (inbox.end, inbox.is_catching_up, inbox.mailbox.delta_count) == (3, True, 0)

    run_virtual(main)


def test_idle_cursor_is_at_the_high_watermark() -> None:
    parts = Parts(start=2, batches=2)
    parts.route.publish("a")
    assert (parts.cursor.applied, parts.cursor.noted_applied) == (3, 2)
    for make_busy in (
        lambda: setattr(parts.inbox, "is_catching_up", True),
        lambda: parts.status.move(FeedEvent.CALL),
        lambda: parts.status.rebuild.request("it is told to"),
    ):
        parts.inbox.is_catching_up = False
        parts.status.move(FeedEvent.REST)
        make_busy()
        assert (parts.cursor.is_idle, parts.cursor.applied, parts.cursor.committed) == (False, 2, 2)


def test_sink_with_its_own_cursor_commits_by_its_reports() -> None:
    parts = Parts(has_own=True, batches=4)
    cursor = parts.cursor
    cursor.last_applied_end = 3
    cursor.advance_applied(3)
    assert (cursor.applied, cursor.committed, cursor.saved) == (3, 0, SavedCursor(0, 0, own=True))
    cursor.note_committed(3)
    assert (cursor.committed, cursor.saved) == (3, SavedCursor(3, 3, own=True))
    assert parts.route.progress_count == 2


def test_cursor_passes_no_limit() -> None:
    parts = Parts(batches=4)
    parts.cursor.limit = 2
    parts.cursor.advance_applied(4)
    assert parts.cursor.noted_applied == 2


def test_wait_ends_with_the_reason_of_a_stop() -> None:
    async def main() -> None:
        parts = Parts(batches=1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(expect_refusal, parts)
            await anyio.sleep(1)
            assert len(parts.cursor.waiters) == 1
            parts.status.end(FeedEvent.STOP, Refused(ErrorCode.PROCESSING_FAILED, "gone"))
            parts.cursor.wake_all()

    async def expect_refusal(parts: Parts) -> None:
        with pytest.raises(Refused, match="gone"):
            await parts.cursor.wait(2)

    run_virtual(main)


def test_pending_rebuild_from_its_request_to_its_end() -> None:
    pending = PendingRebuild()
    assert (pending.progress(), pending.needed_from) == (None, None)
    pending.request("it is told to", is_persistent=True)
    pending.hold_from(5)
    assert (pending.is_persistent, pending.needed_from) == (True, 5)
    pending.begin(100)
    pending.note_rows(40)
    assert pending.progress() == RebuildProgress("it is told to", 5, 40, 100)
    assert (pending.is_persistent, pending.has_begun) == (False, True)
    pending.end()
    assert (pending.progress(), pending.needed_from, pending.has_begun, pending.rebuilds) == (
        None,
        None,
        False,
        1,
    )


def test_queue_drops_withdrawn_requests_but_never_the_first() -> None:
    queue = ReplayQueue()
    requests = [ReplayRequest(None, drop=False, reset_to=0) for _ in range(3)]
    for request in requests[:2]:
        queue.add(request)
        request.is_withdrawn = True
    assert not queue.is_resetting
    queue.add(requests[2])
    assert list(queue.waiting) == [requests[0], requests[2]]
    assert queue.is_resetting


def test_store_asks_the_feed_while_its_sink_is_attached() -> None:
    async def main() -> None:
        partition = Partition.create_in_memory(Settings(), virtual_world())
        store = CursorStore(partition, {"old": SavedCursor(0, 7)})
        async with Route.running() as route:
            feed = route.feed(TinySink(), required=False, limits=LIMITS)
            cursor = store.attach(feed, required=True, evictable=False)
            assert isinstance(cursor, AttachedCursor)
            assert store.names == {"old", feed.name}
            route.publish("a")
            await feed.wait(1)
            assert cursor.saved == SavedCursor(0, 1, required=True)
            assert cursor.needed_from() == 1
            store.save(feed.name, cursor.saved)
            store.detach(feed.name)
            assert store.find(feed.name) == SavedCursor(0, 1, required=True)
        store.forget("old")
        assert store.detached_names == [feed.name]
        with pytest.raises(UsageError, match="no sink named 'old'"):
            store.require("old")

    run_virtual(main)
