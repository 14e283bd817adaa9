"""A minimal pipeline around the orderer, with a list for a log."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from delta_prop.partition.order.orderer import Entry, Orderer, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_wire.errors import Refused


class KnownIds(set[bytes]):
    """Known ids that a test adds."""

    kept_since = 0


@dataclass
class MiniPipeline:
    """Offers entries to the orderer, and records which are appended, refused or duplicates."""

    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ids = KnownIds()
        self.log: list[Entry] = []
        self.duplicates: list[Entry] = []
        self.refusals: dict[Entry, Refused] = {}
        self.append_errors: dict[tuple[int, int], Refused] = {}
        self.orderer = Orderer(self.ids, **self.options)

    def offer(self, *entries: Entry, now: float = 0.0) -> None:
        for entry in entries:
            self.refusals.pop(entry, None)
            self._offer(entry, now)
            self.drain()

    def drain(self) -> None:
        while (entry := self.orderer.next_ready()) is not None:
            if entry.verdict is Verdict.APPEND:
                self._append(entry)
            elif entry.verdict is Verdict.DUPLICATE:
                self.duplicates.append(entry)
            else:
                self.refusals[entry] = self.orderer.overlap(entry)

    def expire(self, now: float) -> None:
        self._note(self.orderer.expire(now))
        self.drain()

    def dots(self) -> list[tuple[int, int]]:
        return [(entry.origin, entry.first) for entry in self.log]

    def is_empty(self) -> bool:
        statistics = self.orderer.statistics()
        return not any(
            (
                statistics.pending_runs,
                statistics.pending_deltas,
                statistics.pending_bytes,
                statistics.pending_owners,
                statistics.awaited_origins,
                statistics.awaited_ids,
                statistics.index_length,
            )
        )

    def _offer(self, entry: Entry, now: float) -> None:
        watermark = self.orderer.watermarks.get(entry.origin, 0)
        if entry.last <= watermark:
            self.duplicates.append(entry)
        elif entry.previous < watermark:
            self.refusals[entry] = self.orderer.overlap(entry)
        elif self.orderer.check(entry):
            self._append(entry)
        elif self.orderer.find_pending(entry) is not None:
            self.duplicates.append(entry)
        else:
            self._note(self.orderer.hold_pending(entry, now))

    def _append(self, entry: Entry) -> None:
        error = self.append_errors.get((entry.origin, entry.first))
        if error is not None:
            self._note(self.orderer.refuse(entry, error))
            return
        self.log.append(entry)
        self.ids.update(entry.ids)
        self.orderer.note_delivered(entry.origin, entry.last, entry.ids)

    def _note(self, refusals: list[Any]) -> None:
        for entry, error in refusals:
            assert entry not in self.refusals, "refused twice"
            self.refusals[entry] = error


@pytest.fixture
def new_pipeline() -> Callable[..., MiniPipeline]:
    """Return a factory of pipelines; it passes its options to the orderer."""
    return lambda **options: MiniPipeline(options)


@pytest.fixture
def new_entry() -> Callable[..., Entry]:
    """Return a factory of entries: `new_entry(origin, first, last=first, clock={…}, …)`."""

    def entry(origin: int, first: int, last: int | None = None, **fields: Any) -> Entry:
        last = first if last is None else last
        clock = fields.pop("clock", {})
        defaults: dict[str, Any] = {
            "previous": first - 1,
            "count": last - first + 1,
            "size": 100 * (last - first + 1),
            "owner": f"producer {origin}",
            "item": None,
            "clock": _clock_dots(clock),
        }
        return Entry(origin, first, last, **defaults | fields)

    return entry


def _clock_dots(clock: dict[int, int]) -> tuple[Any, ...]:
    from delta_prop_wire.delta import Dot

    return tuple(Dot(*entry) for entry in sorted(clock.items()))
