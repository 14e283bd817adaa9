"""The replication sink: brings another service this service's whole log, control rows and all, as it lies.

It keeps nothing: the broker has its cursor, which moves with the other service's acknowledgements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta_prop_sinks.bounds import check_sink_name
from delta_prop_sinks.sink import StopSink, TryAgain
from delta_prop_wire.errors import Refused, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop_sinks.ports import ForwardLink
    from delta_prop_sinks.sink import Delivery, SinkContext

WHOLE = frozenset({"*"})


@dataclass(frozen=True, slots=True)
class ForwardStatistics:
    """`forwarded`: rows that the other service has taken or had already; `link`: of the connection."""

    forwarded: int
    link: object


class ForwardSink:
    """Attach it with all topics: what is left out of a log cannot be folded in order elsewhere.

    A subscriber that publishes again, under names of its own, is the way to bring a part of it.
    """

    control_rows = True
    """It is delivered the rows too that only fill places."""

    deltas_a_call = 20_000
    """A call waits for the way there and back, however far that is."""

    def __init__(self, link: ForwardLink, *, name: str = "forward") -> None:
        if not callable(getattr(link, "forward", None)):
            raise UsageError(
                f'link {link!r:.80}: give a ForwardLink, as in ForwardSink(ForwardLink("host:port"))'
            )
        self.name = check_sink_name(name)
        self._link = link
        self._context: SinkContext | None = None
        self._forwarded = 0

    async def open(self, context: SinkContext) -> None:
        """The service keeps the cursor. Raises UsageError where it is not to have everything."""
        if context.topics != WHOLE:
            raise UsageError(
                f"sink {self.name!r} forwards a whole log, so attach it with all topics; a part of it is "
                "brought by a subscriber that publishes again"
            )
        self._context = context
        self._link.begin(context.log_id)

    async def background(self) -> None:
        """Keep the connection."""
        await self._link.run()

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Return once the other service has all of it."""
        try:
            await self._check_has_what_came_before(deliveries[0].first_offset)
            outcomes = await self._link.forward([delivery.logged for delivery in deliveries])
        except ConnectionError as error:
            raise TryAgain(f"no connection: {error}") from None
        except Refused as refused:
            raise StopSink(f"the other service refuses: {refused.message}") from None
        for delivery, outcome in zip(deliveries, outcomes, strict=True):
            if outcome is not None:
                self._give_up(outcome, delivery.logged.offset)
            self._forwarded += delivery.logged.count

    async def _check_has_what_came_before(self, offset: int) -> None:
        """Who answers now may have less than was brought: a new log, a copy, a disk that lost its tail."""
        has, context = await self._link.greeted(), self._context
        assert context is not None, "a sink that gets deliveries is open"
        missing = None if has is None else context.first_missing(has)
        if missing is None or missing >= offset:
            return
        try:
            context.go_back(missing)
        except Refused:
            raise StopSink(
                f"the other service lacks deltas from offset {missing} on, which this log no longer holds: "
                "restore a copy of this log there, and start it with that"
            ) from None
        raise TryAgain(f"the other service lacks deltas from offset {missing} on, though it had them")

    def _give_up(self, refused: Refused, offset: int) -> None:
        if refused.retryable:
            raise TryAgain(f"the other service refuses for now: {refused}", offset)
        raise StopSink(f"the other service refuses offset {offset}: {refused}")

    async def aclose(self) -> None:
        """The connection ends with `background`."""

    def statistics(self) -> ForwardStatistics:
        """A snapshot."""
        return ForwardStatistics(self._forwarded, self._link.statistics())
