"""The causal orderer: holds a delta until everything that must come before it has been delivered.

Pure: it appends nothing and tells nobody, it answers what may be appended now and what is refused.
Its rule: `have` moves only through `delivered`, so a refused or failed delta leaves its dot open.

    if orderer.check(entry):
        append(entry); orderer.delivered(entry.origin, entry.last, entry.ids)
        while (entry := orderer.next_ready()) is not None:
            ...the same for each, or `refuse` where the append fails
    else:
        tell(orderer.park(entry, now))
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from delta_prop.order.missing import DotRange, Missing, held_behind, overlap, pending_full, timed_out
from delta_prop.order.pending import Entry, Pending, Verdict
from delta_prop.order.waiters import Waiters
from delta_prop_wire.delta import Dot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from delta_prop_wire.errors import Refused

__all__ = ["Entry", "Orderer", "OrdererStatistics", "Refusal", "Verdict"]

PENDING_DELTAS_MAX = 10_000
PENDING_BYTES_MAX = 64 * 1024 * 1024
PENDING_TIME_S_MAX = 30.0
OWNER_SHARE = 0.25
RESERVE_SHARE = 0.1


class Refusal(NamedTuple):
    """An entry and the answer for its producer; its dot stays open."""

    entry: Entry
    error: Refused


@dataclass(frozen=True, slots=True)
class OrdererStatistics:
    """A snapshot. `index_length` counts stale items too; nothing pending means that all are 0."""

    pending_runs: int
    pending_deltas: int
    pending_bytes: int
    pending_owners: int
    awaited_origins: int
    awaited_ids: int
    index_length: int
    parked: int
    released: int
    overtaken: int
    refused_full: int
    refused_timeout: int
    refused_behind: int


class Orderer:
    """Causal order over all origins of one partition, with a bounded waiting room.

    Bounds hold in deltas and in bytes. One owner may fill `owner_share` of each. `reserve_share` of
    each is kept for entries that something pending waits for: else a full room could keep out the
    very delta that would empty it.
    """

    def __init__(
        self,
        *,
        knows_id: Callable[[bytes], bool],
        ids_kept_since: Callable[[], str | None] = lambda: None,
        have: Mapping[int, int] | None = None,
        pending_deltas_max: int = PENDING_DELTAS_MAX,
        pending_bytes_max: int = PENDING_BYTES_MAX,
        pending_time_s_max: float = PENDING_TIME_S_MAX,
        owner_share: float = OWNER_SHARE,
        reserve_share: float = RESERVE_SHARE,
    ) -> None:
        self.have: dict[int, int] = dict(have or {})
        """Origin to its watermark, the highest counter delivered without a gap. Read only."""
        self._knows_id = knows_id
        self._ids_kept_since = ids_kept_since
        self._time_s_max = pending_time_s_max
        self._pending = Pending(
            deltas_max=pending_deltas_max,
            bytes_max=pending_bytes_max,
            time_s_max=pending_time_s_max,
            owner_share=owner_share,
            reserve_share=reserve_share,
        )
        self._waiters = Waiters(self._pending.entries, self.have)
        self._ready: deque[Entry] = deque()
        self._parked = self._released = self._overtaken = 0
        self._refused_full = self._refused_timeout = self._refused_behind = 0

    # --- what comes in

    def check(self, entry: Entry) -> bool:
        """Whether it is next: its origin is there, its clock is covered, its parents are delivered."""
        have, origin = self.have, entry.origin
        if have.get(origin, 0) != entry.previous:
            return False
        for other, counter in entry.clock:
            if have.get(other, 0) < counter and other != origin:
                return False
        return not entry.parents or self._has_parents(entry)

    def holds(self, entry: Entry) -> bool:
        """Whether this entry itself is parked."""
        return entry in self._pending

    def parked(self, entry: Entry) -> Entry | None:
        """What is parked already at this place of this origin: the same run, or another cut of it."""
        return self._waiters.run(entry.origin, entry.previous)

    def park(self, entry: Entry, now: float) -> list[Refusal]:
        """Let an entry wait. The caller has found that it is not next, nor parked.

        Without room it is refused instead, with everything behind it: those refusals are returned.
        So is, alone, one that begins below its origin's watermark.
        """
        if entry.previous < self.have.get(entry.origin, 0):
            return [Refusal(entry, self.overlap(entry))]
        pending = self._pending
        if not pending.fits(entry):
            shortage = pending.shortage(entry, wanted=self._waiters.wanted(entry))
            if shortage is not None:
                self._refused_full += 1
                return self._refuse(entry, pending_full(self.missing(entry), shortage))
        self._hold(entry, now)
        return []

    def delivered(self, origin: int, last: int, ids: Sequence[bytes] = ()) -> None:
        """Note what has been appended, a control row too; then take what it released by `next_ready`."""
        before = self.have.get(origin, 0)
        assert last > before, "delivered twice"
        self.have[origin] = last
        if self._pending.entries:
            self._release(origin, before, last, ids)

    @property
    def any_pending(self) -> bool:
        """Whether something waits for what comes before it."""
        return bool(self._pending.entries)

    @property
    def any_ready(self) -> bool:
        """Whether `next_ready` has something."""
        return bool(self._ready)

    def next_ready(self) -> Entry | None:
        """The next entry that waits no more, in order of release. Act on its verdict, then ask again."""
        if not self._ready:
            return None
        entry = self._ready.popleft()
        watermark = self.have.get(entry.origin, 0)
        if watermark == entry.previous:
            self._released += 1  # the verdict of every entry, unless it was overtaken
        else:
            entry.verdict = Verdict.REPEAT if entry.last <= watermark else Verdict.OVERLAP
            self._overtaken += 1
        return entry

    # --- what does not go through

    def refuse(self, entry: Entry, error: Refused) -> list[Refusal]:
        """Refuse an entry that could not be appended, or is parked, and everything behind it."""
        if entry in self._pending:
            self._let_go(entry)
        return self._refuse(entry, error)

    def expire(self, now: float) -> list[Refusal]:
        """Refuse what has waited too long, and everything behind it."""
        refusals: list[Refusal] = []
        for entry in self._pending.expired(now):
            self._let_go(entry)
            self._refused_timeout += 1
            error = timed_out(self.missing(entry), self._time_s_max, self._ids_kept_since())
            refusals += self._refuse(entry, error)
        return refusals

    def next_deadline(self) -> float | None:
        """When `expire` has something to do at the earliest."""
        oldest = self._pending.oldest()
        return None if oldest is None else oldest.deadline

    def withdraw(self, entry: Entry, now: float) -> bool:
        """Give up a parked entry: it becomes void, and only keeps its place in its origin's order.

        It waits no longer for its parents, but still for its clock, which later runs build upon. Once
        released, maybe at once, its caller appends a control row; so what stands behind it goes on.
        False where it is not parked.
        """
        if entry not in self._pending:
            return False
        self._let_go(entry)
        entry.void = True
        entry.parents = entry.needs = entry.needs_ids = ()
        if self.check(entry):
            self._ready.append(entry)
        else:
            self._hold(entry, now)  # takes the room that it has just left
        return True

    def waiting_for(self, ids: Iterable[bytes]) -> list[Entry]:
        """Find the parked entries that wait for a delta with one of these ids, in order of arrival."""
        return sorted(self._waiters.waiting_for(ids), key=_arrival)

    def take_origin(self, origin: int) -> list[Entry]:
        """Let all parked runs of an origin go: its producer has been fenced."""
        entries = self._waiters.runs(origin)
        for entry in entries:
            self._let_go(entry)
        return entries

    def drain(self) -> list[Entry]:
        """Let everything go, in order of arrival."""
        entries = [*self._ready, *self._pending.entries.values()]
        self._ready.clear()
        for entry in list(self._pending.entries.values()):
            self._let_go(entry)
        return entries

    def forget(self, origin: int) -> None:
        """Drop an origin's watermark: of a stand-in that is done with, of one that has long been idle."""
        self.have.pop(origin, None)

    # --- what is asked

    def missing(self, entry: Entry) -> Missing:
        """What an entry waits for, its own origin first."""
        have, dots = self.have, []
        watermark = have.get(entry.origin, 0)
        if watermark < entry.previous:
            dots.append(DotRange(entry.origin, watermark + 1, entry.previous))
        needs, ids = self._needs(entry)
        dots += [DotRange(origin, have.get(origin, 0) + 1, last) for origin, last in sorted(needs)]
        return Missing(tuple(dots), tuple(ids))

    def overlap(self, entry: Entry) -> Refused:
        """The refusal of an entry of which a part is delivered, or parked under another cut."""
        return overlap(entry, self.have.get(entry.origin, 0), self.parked(entry))

    def statistics(self) -> OrdererStatistics:
        """What is pending now, and what has happened so far."""
        pending, waiters = self._pending, self._waiters
        return OrdererStatistics(
            pending_runs=len(pending),
            pending_deltas=pending.deltas,
            pending_bytes=pending.bytes,
            pending_owners=len(pending.owners),
            awaited_origins=waiters.origins,
            awaited_ids=waiters.ids,
            index_length=waiters.index_length + pending.queue_length,
            parked=self._parked,
            released=self._released,
            overtaken=self._overtaken,
            refused_full=self._refused_full,
            refused_timeout=self._refused_timeout,
            refused_behind=self._refused_behind,
        )

    # --- inside

    def _has_parents(self, entry: Entry) -> bool:
        return not any(self._is_missing(entry, parent) for parent in entry.parents)

    def _is_missing(self, entry: Entry, parent: Dot | bytes) -> bool:
        if isinstance(parent, bytes):
            return not self._knows_id(parent) and parent not in entry.ids
        origin, counter = parent
        if origin == entry.origin and counter <= entry.last:
            return False  # the run's own order sees to it
        if origin < 0:  # a stand-in, whose watermark is forgotten once it is done with
            return self._waiters.run(origin, 0) is not None
        return self.have.get(origin, 0) < counter

    def _needs(self, entry: Entry) -> tuple[Sequence[tuple[int, int]], Sequence[bytes]]:
        """The highest missing counter of each origin, and the missing ids."""
        have = self.have
        needs: dict[int, int] = {}
        for origin, counter in entry.clock:
            if have.get(origin, 0) < counter and origin != entry.origin:
                needs[origin] = max(counter, needs.get(origin, 0))
        if not entry.parents:
            return tuple(needs.items()), ()
        absent = [parent for parent in entry.parents if self._is_missing(entry, parent)]
        for parent in absent:
            if isinstance(parent, tuple):
                needs[parent.origin] = max(parent.counter, needs.get(parent.origin, 0))
        return tuple(needs.items()), tuple(
            dict.fromkeys(parent for parent in absent if isinstance(parent, bytes))
        )

    def _hold(self, entry: Entry, now: float) -> None:
        if entry.clock or entry.parents:
            entry.needs, entry.needs_ids = self._needs(entry)
        self._pending.add(entry, now)
        self._waiters.add(entry)
        self._parked += 1
        assert entry.missing, "parked although it is next: nothing would release it"

    def _let_go(self, entry: Entry) -> None:
        self._pending.remove(entry)
        self._waiters.discard(entry)

    def _release(self, origin: int, before: int, last: int, ids: Sequence[bytes]) -> None:
        complete, overtaken = self._waiters.reached(origin, before, last)
        for entry in overtaken:
            self._let_go(entry)
        if ids and self._waiters.ids:
            for delta_id in ids:
                complete += self._waiters.known(delta_id)
        if len(complete) > 1:
            complete.sort(key=_arrival)
        remove, discard = self._pending.remove, self._waiters.discard
        for entry in complete:
            remove(entry)
            discard(entry)
        self._ready += complete
        self._ready += overtaken

    def _refuse(self, root: Entry, error: Refused) -> list[Refusal]:
        """The refusal of an entry that is out already, then of everything behind it."""
        behind: list[Entry] = []
        look_behind = [root]
        while look_behind:
            for entry in self._waiters.behind(look_behind.pop()):
                self._let_go(entry)
                behind.append(entry)
                look_behind.append(entry)
        behind.sort(key=_arrival)
        self._refused_behind += len(behind)
        refusals = [Refusal(entry, held_behind(root, error, self.missing(entry))) for entry in behind]
        return [Refusal(root, error), *refusals]


def _arrival(entry: Entry) -> int:
    return entry.ticket
