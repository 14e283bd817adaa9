"""The replication sink: forwards this service's full log unchanged, with control rows, to another service.

It stores nothing: the service stores its cursor, which moves with the other service's acknowledgements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from delta_prop_sinks.argument_checks import check_sink_name
from delta_prop_sinks.ports import ForwardLink
from delta_prop_sinks.sink import Delivery, SinkContext, StopSink, TryAgain
from delta_prop_wire.errors import Refused, UsageError

ALL_TOPICS = frozenset({"*"})


@dataclass(frozen=True, slots=True)
class ForwardStatistics:
    """`forwarded`: rows that the other service stored or already had; `link`: the connection's statistics."""

    forwarded: int
    link: object


class ForwardSink:
    """Forwards the full log. Attach it with all topics: another service cannot fold a partial log in order.

    To forward a part of a log, run a subscriber that republishes its deltas under other vector ids.
    """

    control_rows = True
    """The sink also gets control rows, which only fill offsets."""

    deltas_per_call = 20_000
    """Large calls, because each one waits for a network round trip, which may be long."""

    def __init__(self, link: ForwardLink, *, name: str = "forward") -> None:
        if not callable(getattr(link, "forward", None)):
            raise UsageError(
                f"link {link!r:.80} has no forward(): give a ForwardLink, as in "
                'ForwardSink(ForwardLink("host:port"))'
            )
        self.name = check_sink_name(name)
        self._link = link
        self._context: SinkContext | None = None
        self._forwarded = 0

    async def open(self, context: SinkContext) -> None:
        """Start the link; the service stores the cursor. Raises UsageError unless attached to all topics."""
        if context.topics != ALL_TOPICS:
            raise UsageError(
                f"sink {self.name!r} forwards a full log and is attached to some topics only: attach it to "
                "all topics, or forward a part with a subscriber that republishes it"
            )
        self._context = context
        self._link.begin(context.log_id)

    async def background(self) -> None:
        """Keep the connection up."""
        await self._link.run()

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Return once the other service has stored all rows."""
        try:
            await self._check_receiver_has_prefix(deliveries[0].first_offset)
            outcomes = await self._link.forward([delivery.logged for delivery in deliveries])
        except ConnectionError as error:
            raise TryAgain(f"not connected to the other service: {error}") from None
        except Refused as refused:
            raise StopSink(f"the other service refuses: {refused.message}") from None
        for delivery, outcome in zip(deliveries, outcomes, strict=True):
            if outcome is not None:
                self._raise_refusal(outcome, delivery.logged.offset)
            self._forwarded += delivery.logged.count

    async def _check_receiver_has_prefix(self, offset: int) -> None:
        """Rewind if the receiver lost deltas, for example because its log is new or an older copy."""
        watermarks, context = await self._link.wait_for_watermarks(), self._context
        assert context is not None, "deliveries came before the sink was opened"
        missing = None if watermarks is None else context.first_missing(watermarks)
        if missing is None or missing >= offset:
            return
        try:
            context.rewind(missing)
        except Refused:
            raise StopSink(
                f"the other service lacks deltas from offset {missing} on, which this log no longer holds: "
                "restore a copy of this log there, and start that service with it"
            ) from None
        raise TryAgain(f"the other service lacks deltas from offset {missing} on, though it had them")

    def _raise_refusal(self, refused: Refused, offset: int) -> None:
        if refused.retryable:
            raise TryAgain(f"the other service refuses for now: {refused}", offset)
        raise StopSink(f"the other service refuses offset {offset}: {refused}")

    async def aclose(self) -> None:
        """Do nothing: the connection ends with `background`."""

    def statistics(self) -> ForwardStatistics:
        """Return a snapshot."""
        return ForwardStatistics(self._forwarded, self._link.statistics())
