"""Origins: their owners and epochs, and the offsets of the deltas that each has written.

Pure. The orderer has the watermark of each origin, since one comparison decides dedup and order there; this
module holds all other state of an origin.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from delta_prop.partition.ingest.epochs import (
    CLAIMED_EPOCH_MAX,
    EPOCH_MAX,
    SPARE_EPOCHS,
    claimed_epoch_too_high,
    epoch_not_reserved,
    epochs_exhausted,
    fenced_by,
    origin_not_owned,
)
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop_wire.batch import Batch
    from delta_prop_wire.frames import OriginClaim

OWN = ""
"""Owner of the service's own origins, which never become idle."""
ORIGINS_MAX = 100_000
ORIGINS_PER_OWNER_MAX = 1_000
IDLE_S_MAX = 7 * 24 * 3600.0
IDLE_RATIO = 10
"""Maximum number of idle origins, as a multiple of `origins_max`."""
RECENT_BATCHES = 64
"""Number of the newest batches of an origin whose checksums are compared."""
NOOPS_MAX = 10_000
"""Maximum number of stored ranges of no-op dots per origin; a resent delta of an older range is acknowledged
without an offset.
"""
OFFSET_RANGES_MAX = 2_000_000
"""Maximum number of stored ranges of first offsets, of all origins together; a range takes 24 bytes."""


UNKNOWN_OWNER = "\0"
"""Owner of an origin that a log names, until its producer says hello."""


Columns: TypeAlias = "tuple[array[int], array[int], array[int]]"
"""The first counters of ranges, their last counters, and a value for each range."""


class SavedOrigin(NamedTuple):
    """The state of one origin, as arrays.

    The value of a range is, in `recent`, the checksum of a recent batch; in `ranges`, the offset of its first
    delta, and the others follow; in `noops`, the code of the no-ops that fill its dots. `forgot`: True if
    older ranges were dropped. `known_above`: only the outcomes of higher counters are known.
    """

    epoch: int
    known_above: int
    forgot: bool
    recent: Columns
    ranges: Columns
    noops: Columns


def _make_columns(kinds: str) -> Columns:
    one, two, three = (array(kind) for kind in kinds)
    return one, two, three


@dataclass(slots=True)
class OriginColumns:
    """The concatenated columns of many active origins, for a checkpoint, without an object for each.

    The attributes have the names of the checkpoint's fields; `runs` and `voids` are the `ranges` and `noops`
    of `SavedOrigin`.
    """

    epochs: array[int] = field(default_factory=partial(array, "Q"))
    known_above: array[int] = field(default_factory=partial(array, "Q"))
    forgot: array[int] = field(default_factory=partial(array, "B"))
    recent_counts: array[int] = field(default_factory=partial(array, "Q"))
    runs_counts: array[int] = field(default_factory=partial(array, "Q"))
    voids_counts: array[int] = field(default_factory=partial(array, "Q"))
    recent: Columns = field(default_factory=partial(_make_columns, "QQI"))
    runs: Columns = field(default_factory=partial(_make_columns, "QQQ"))
    voids: Columns = field(default_factory=partial(_make_columns, "QQI"))


class OriginState:
    """The state of one origin except its watermark."""

    __slots__ = (
        "_has_dropped_ranges",
        "_noops",
        "_ranges",
        "_ranges_saved",
        "_recent",
        "claims",
        "epoch",
        "is_changed",
        "known_above",
        "owner",
        "seen_at",
    )

    def __init__(self, owner: str, epoch: int, now: float, known_above: int = 0) -> None:
        self.owner = owner
        self.epoch = epoch
        self.claims = 0  # number of hellos over the network; after each, the producer resends its batches
        self.seen_at = now
        self.known_above = known_above  # up to here memory lacks the outcomes, since the origin was idle
        self.is_changed = True  # since the last save
        self._ranges_saved = 0  # saved ranges that can no longer change
        self._has_dropped_ranges = False
        self._recent, self._ranges, self._noops = map(_make_columns, ("QQI", "QQQ", "QQI"))

    def note_appended(
        self, batch: Batch, offset: int, first_offsets: Mapping[int, int | None] | None = None
    ) -> int:
        """Note an appended batch; return the number of added ranges.

        `first_offsets`: for rows whose ids had been accepted before, the offset of the first copy; None: it
        is unknown.
        """
        self.is_changed = True
        self.note_checksum(batch.base, batch.last, batch.crc)
        if first_offsets is None and not batch.has_gaps:
            return self._extend_ranges(batch.base, offset, batch.count)
        if first_offsets is not None:
            for row, first in first_offsets.items():
                if first is None:
                    self._note_noop(batch.counter(row), batch.counter(row), ErrorCode.OUTCOME_UNKNOWN)
            known = ((row, first) for row, first in first_offsets.items() if first is not None)
            return sum(self._extend_ranges(batch.counter(row), first) for row, first in known)
        counters = batch.counters
        assert counters is not None
        return sum(self._extend_ranges(int(counter), offset + row) for row, counter in enumerate(counters))

    def note_appended_run(self, batches: Sequence[Batch], offset: int) -> int:
        """Do the same as `note_appended` for batches whose counters and offsets are contiguous across all
        batches.
        """
        self.is_changed = True
        bases, lasts, crcs = self._recent
        if len(bases) >= 2 * RECENT_BATCHES:
            self._shorten_recent()
        for batch in batches:
            bases.append(base := batch.base)
            lasts.append(base + batch.count - 1)
            crcs.append(batch.crc)
        first = batches[0].base
        return self._extend_ranges(first, offset, lasts[-1] + 1 - first)

    def note_noop(self, batch: Batch, code: ErrorCode) -> None:
        """Note that the dots of a batch were refused for good, so that a duplicate is refused, not
        acknowledged.
        """
        self._note_noop(batch.base, batch.last, code)

    def _note_noop(self, base: int, last: int, code: ErrorCode) -> None:
        if len(self._noops[0]) >= NOOPS_MAX:
            for column in self._noops:
                del column[: NOOPS_MAX // 2]
        for column, value in zip(self._noops, (base, last, code), strict=True):
            column.append(value)

    def first_noop(self, batch: Batch) -> tuple[int, ErrorCode] | None:
        """Return the first counter of the batch whose dot is a no-op, and its code; None if none is."""
        bases, lasts, codes = self._noops
        index = bisect_left(lasts, batch.base)
        if index == len(bases) or bases[index] > batch.last:
            return None
        return max(batch.base, bases[index]), ErrorCode(codes[index])

    def outcome(self, counter: int) -> int | ErrorCode | None:
        """Return the offset of the delta with this counter, or its no-op's code; None if memory lacks it.

        The code is DOT_REUSED if the producer skipped the counter.
        """
        outcome = self._find_noop(counter, counter) or self.first_offset(counter)
        is_within_memory = bool(self._ranges[0] and self._ranges[0][0] < counter)
        return (
            ErrorCode.DOT_REUSED
            if outcome is None and is_within_memory and not self._may_lack_noop(counter)
            else outcome
        )

    def _may_lack_noop(self, counter: int) -> bool:
        """Return True if a no-op with this counter may have been dropped from memory."""
        return len(self._noops[0]) >= NOOPS_MAX // 2 and counter < self._noops[0][0]

    def _find_noop(self, base: int, last: int) -> ErrorCode | None:
        bases, lasts, codes = self._noops
        index = bisect_right(bases, last) - 1
        return None if index < 0 or lasts[index] < base else ErrorCode(codes[index])

    def first_offset(self, counter: int) -> int | None:
        """Return the offset of the delta with this counter; None if memory does not have it."""
        bases, lasts, offsets = self._ranges
        index = bisect_right(bases, counter) - 1
        if index < 0 or counter > lasts[index] or self._may_lack_noop(counter):
            return None
        return offsets[index] + counter - bases[index]

    def first_offset_above(self, counter: int) -> int | None:
        """Return an offset from which a reader finds every delta after a counter: that of the first one, or a
        lower one. None if memory does not reach back that far.
        """
        bases, lasts, offsets = self._ranges
        index = bisect_right(lasts, counter)
        if index == len(lasts) or counter < self.known_above or (index == 0 and self._has_dropped_ranges):
            return None
        offset = offsets[index] + max(counter + 1 - bases[index], 0)
        if index == 0:
            return offset
        # A duplicate under a new dot has the offset of its first copy, so offsets may fall from one range to
        # the next: take the end of the range before, if that is higher.
        return max(offset, offsets[index - 1] + lasts[index - 1] - bases[index - 1] + 1)

    def is_same_frame(self, batch: Batch) -> bool | None:
        """Return True if this duplicate is a frame that was sent before; None if that is unknown.

        A producer resends the same frames. A batch with other bounds than the recent batches cannot be
        verified by their checksums.
        """
        recent = zip(*(column[-RECENT_BATCHES:] for column in self._recent), strict=True)
        known_crcs = [crc for base, last, crc in recent if base == batch.base and last == batch.last]
        return batch.crc in known_crcs if known_crcs else None

    @property
    def range_count(self) -> int:
        """Number of stored ranges of first offsets."""
        return len(self._ranges[0])

    def drop_older_ranges(self) -> int:
        """Drop the older half of the ranges of first offsets; return their number."""
        half = self.range_count // 2
        for column in self._ranges:
            del column[:half]
        self._ranges_saved = max(self._ranges_saved - half, 0)
        self._has_dropped_ranges = True
        return half

    def save(self, columns: OriginColumns, *, full: bool) -> None:
        """Add the state to columns for a checkpoint; unless `full`, only the ranges changed since the last
        save.
        """
        first = 0 if full else self._ranges_saved
        self.is_changed = False
        self._ranges_saved = max(self.range_count - 1, 0)  # the last one may still grow
        columns.epochs.append(self.epoch)
        columns.known_above.append(self.known_above)
        columns.forgot.append(self._has_dropped_ranges)
        columns.recent_counts.append(min(len(self._recent[0]), RECENT_BATCHES))
        columns.runs_counts.append(self.range_count - first)
        columns.voids_counts.append(len(self._noops[0]))
        for saved, own, start in (
            (columns.recent, self._recent, -RECENT_BATCHES),
            (columns.runs, self._ranges, first),
            (columns.voids, self._noops, 0),
        ):
            for saved_column, own_column in zip(saved, own, strict=True):
                saved_column.extend(own_column[start:])

    @classmethod
    def from_saved(cls, saved: SavedOrigin, now: float) -> OriginState:
        """Restore a state that `save` wrote in full; its owner is unknown until its producer says hello."""
        state = cls(UNKNOWN_OWNER, saved.epoch, now, saved.known_above)
        state._has_dropped_ranges = saved.forgot
        state._recent, state._ranges, state._noops = saved.recent, saved.ranges, saved.noops
        state._ranges_saved = max(state.range_count - 1, 0)
        state.is_changed = False
        return state

    def note_checksum(self, base: int, last: int, crc: int) -> None:
        """Store the checksum of a batch with these first and last counters, to distinguish a duplicate from a
        reused dot.
        """
        bases, lasts, crcs = self._recent
        if len(bases) >= 2 * RECENT_BATCHES:
            self._shorten_recent()
        bases.append(base)
        lasts.append(last)
        crcs.append(crc)

    def _shorten_recent(self) -> None:
        """Drop old checksums; called now and then, not at each batch."""
        for column in self._recent:
            del column[:-RECENT_BATCHES]

    def _extend_ranges(self, base: int, offset: int, count: int = 1) -> int:
        bases, lasts, offsets = self._ranges
        if bases and base == lasts[-1] + 1 and base - bases[-1] == offset - offsets[-1]:
            lasts[-1] = base + count - 1  # contiguous with the last range, in counters and in offsets
            return 0
        bases.append(base)
        lasts.append(base + count - 1)
        offsets.append(offset)
        return 1


@dataclass(frozen=True, slots=True)
class Grant:
    """The grant of an origin by a hello: the epoch to write under, and the present watermark."""

    origin: int
    epoch: int
    watermark: int


class Origins:
    """All origins, bounded per owner and in total; idle ones are deactivated, never forgotten."""

    def __init__(
        self,
        *,
        origins_max: int = ORIGINS_MAX,
        per_owner_max: int = ORIGINS_PER_OWNER_MAX,
        epoch_floor: int = 0,
        epoch_limit: int = EPOCH_MAX,
    ) -> None:
        """`epoch_floor`, `epoch_limit`: a new epoch is above the floor and up to the limit, whatever epoch
        its origin had before.
        """
        self.epoch_requested = 0
        """The highest epoch that the caller must reserve on disk; 0 if the epochs up to `epoch_limit`
        suffice.
        """
        self._epoch_floor = epoch_floor
        self._epoch_limit = epoch_limit
        self._origins_max = origins_max
        self._per_owner_max = per_owner_max
        self._active: OrderedDict[int, OriginState] = OrderedDict()  # least recently seen first
        # Origin -> (owner, epoch). No entry may be forgotten, so new origins are refused at a bound.
        self._idle: dict[int, tuple[str, int]] = {}
        self._owned_counts: dict[str, int] = {}
        self._range_count = 0

    def __len__(self) -> int:
        return len(self._active) + len(self._idle)

    def check_capacity(self, origins: Iterable[int], owner: str, *, bounded: bool = True) -> None:
        """Raise Refused (RATE_LIMITED) if these origins are too many, for this owner (if `bounded`) or in
        total.
        """
        new_count = sum(origin not in self._active and origin not in self._idle for origin in origins)
        owned_count = self._owned_counts.get(owner, 0)
        is_full = (
            len(self._active) + new_count > self._origins_max
            or len(self._idle) > IDLE_RATIO * self._origins_max
        )
        if new_count and (is_full or (bounded and owned_count + new_count > self._per_owner_max)):
            raise Refused(
                ErrorCode.RATE_LIMITED,
                f"origins of {owner!r}: {owned_count} of {self._per_owner_max} in use, "
                f"{len(self._active)} of {self._origins_max} in total: use fewer "
                "producer names (each has an origin per priority)",
                retry_after_ms=60_000,
                details={"depth": len(self._active), "capacity": self._origins_max},
            )

    def hello(self, origin: int, owner: str, now: float, watermark: int = 0) -> OriginState:
        """Grant the next epoch, which fences writers under earlier epochs. Call `check_capacity` before.

        Raises Refused (RATE_LIMITED) while no more epochs are reserved, BAD_REQUEST if none are left.
        """
        return self._grant(origin, owner, self._next_epoch(origin), now, watermark)

    def claim(self, origin: int, epoch: int, owner: str, now: float, watermark: int) -> OriginState:
        """Grant the epoch that a producer holds, or a new one if `epoch` is 0, unless another producer holds
        a later one.

        An unknown epoch is accepted: an earlier opening of this log, or a lost log, may have granted it.
        Raises Refused as `hello` does, and FENCED, UNAUTHORIZED, or BAD_REQUEST if the epoch is too high.
        Call `check_capacity` before.
        """
        return self._grant(origin, owner, self._claimed_epoch(origin, epoch, owner), now, watermark)

    def check_claims(self, claims: Sequence[OriginClaim], owner: str, *, bounded: bool) -> None:
        """Raise Refused as `check_capacity` and `claim` would, but grant nothing, so that a refused hello
        fences no writer.
        """
        self.check_capacity([claim.origin for claim in claims], owner, bounded=bounded)
        for claim in claims:
            self._claimed_epoch(claim.origin, claim.epoch, owner)

    def _claimed_epoch(self, origin: int, epoch: int, owner: str) -> int:
        self.check_owner(origin, owner)
        if epoch == 0:
            return self._next_epoch(origin)
        present = self._current_epoch(origin)
        if epoch < present:
            raise fenced_by(origin, epoch, present)
        if epoch > present and epoch > self._epoch_floor:
            if epoch > CLAIMED_EPOCH_MAX:
                raise claimed_epoch_too_high(origin, epoch)
            self._check_reserved(origin, epoch)
        return epoch

    def note_forwarded(self, origin: int, owner: str, epoch: int, now: float, watermark: int) -> None:
        """Note an origin that first came in another service's log. Call `check_capacity` before."""
        self._grant(origin, owner, epoch, now, watermark)

    def note_reserved(self, epoch_limit: int) -> None:
        """Note that all epochs up to this one are reserved: the next opening grants only higher ones."""
        self._epoch_limit = epoch_limit
        if epoch_limit >= self.epoch_requested:
            self.epoch_requested = 0

    def _next_epoch(self, origin: int) -> int:
        epoch = max(self._current_epoch(origin), self._epoch_floor) + 1
        self._check_reserved(origin, epoch)
        return epoch

    def _current_epoch(self, origin: int) -> int:
        known = self._active.get(origin)
        return known.epoch if known is not None else self._idle.get(origin, ("", 0))[1]

    def _check_reserved(self, origin: int, epoch: int) -> None:
        """Raise Refused if an epoch is not reserved on disk; request more epochs if few are left."""
        limit = self._epoch_limit
        if epoch <= limit - SPARE_EPOCHS:
            return
        if epoch > max(CLAIMED_EPOCH_MAX, limit) + SPARE_EPOCHS or epoch > EPOCH_MAX:
            raise epochs_exhausted(origin)
        self.epoch_requested = max(self.epoch_requested, epoch + SPARE_EPOCHS)
        if epoch > limit:
            raise epoch_not_reserved(origin, epoch)

    def check_owner(self, origin: int, owner: str) -> None:
        """Raise Refused (UNAUTHORIZED) if the origin belongs to another owner."""
        known = self._active.get(origin)
        holder = known.owner if known is not None else self._idle.get(origin, (UNKNOWN_OWNER, 0))[0]
        if holder not in (owner, UNKNOWN_OWNER):
            raise origin_not_owned(origin)

    def restore(self, origin: int, epoch: int, now: float) -> OriginState:
        """Return the state of an origin that a log names; it may write once its producer has said hello."""
        state = self._active.get(origin)
        if state is None:
            state = self._active[origin] = OriginState(UNKNOWN_OWNER, epoch, now)
            self._owned_counts[UNKNOWN_OWNER] = self._owned_counts.get(UNKNOWN_OWNER, 0) + 1
        state.epoch = max(state.epoch, epoch)
        return state

    def carry_over(self, previous: Origins) -> None:
        """Adopt the grants from before the log failed: the owner and epoch of each origin."""
        for origin, state in previous._active.items():
            if state.owner not in (OWN, UNKNOWN_OWNER):
                self._grant(origin, state.owner, state.epoch, state.seen_at, state.known_above)
        for origin, (owner, epoch) in previous._idle.items():
            if origin in self._active:
                self._grant(origin, owner, epoch, self._active[origin].seen_at, 0)
            elif origin not in self._idle:
                self._idle[origin] = (owner, epoch)
                self._owned_counts[owner] = self._owned_counts.get(owner, 0) + 1

    def _grant(self, origin: int, owner: str, epoch: int, seen_at: float, known_above: int) -> OriginState:
        """Let an owner write under this epoch, or under the known epoch if that is higher."""
        state = self._active.get(origin)
        if state is None:
            former = self._idle.pop(origin, None)
            state = self._active[origin] = OriginState(owner, epoch, seen_at, known_above)
            if former is not None and former[0] != UNKNOWN_OWNER:
                self._owned_counts[former[0]] -= 1
        else:
            self._owned_counts[state.owner] -= 1
            state.seen_at = max(state.seen_at, seen_at)
            self._active.move_to_end(origin)
        state.owner, state.epoch, state.is_changed = owner, max(state.epoch, epoch), True
        self._owned_counts[owner] = self._owned_counts.get(owner, 0) + 1
        return state

    def list_all(self) -> tuple[list[int], dict[int, tuple[str, int]]]:
        """Return copies: the active origins, and (owner, epoch) of the idle ones."""
        return list(self._active), dict(self._idle)

    def restore_states(self, active: Mapping[int, OriginState], idle: Mapping[int, int]) -> None:
        """Restore from a checkpoint: the states of active origins, the epochs of idle ones."""
        for origin, state in active.items():
            if origin not in self._active:
                self._active[origin] = state
                self._range_count += state.range_count
                self._owned_counts[UNKNOWN_OWNER] = self._owned_counts.get(UNKNOWN_OWNER, 0) + 1
        for origin, epoch in idle.items():
            self._idle.setdefault(origin, (UNKNOWN_OWNER, epoch))

    def get(self, origin: int) -> OriginState | None:
        """Return the state of an active origin; None if it is idle or unknown."""
        return self._active.get(origin)

    def require(self, batch: Batch, owner: str, *, is_duplicate: bool = False) -> OriginState:
        """Return the state of a batch's origin. Raises Refused (UNKNOWN_ORIGIN, FENCED, UNAUTHORIZED).

        A duplicate may have an earlier epoch, if its producer has said hello again and resends the frame.
        """
        state = self._active.get(batch.origin)
        if state is None or state.owner == UNKNOWN_OWNER or batch.epoch > state.epoch:
            raise Refused(
                ErrorCode.UNKNOWN_ORIGIN,
                f"origin {batch.origin:016x} epoch {batch.epoch}: unknown here: say hello again",
                details={"origin": batch.origin},
            )
        if owner != state.owner:
            raise origin_not_owned(batch.origin)
        if batch.epoch < state.epoch and not is_duplicate:
            raise fenced_by(batch.origin, batch.epoch, state.epoch)
        return state

    def find_writer(self, batch: Batch, owner: str) -> OriginState | None:
        """Return the state of a batch's origin if this owner may write; `require` raises otherwise."""
        state = self._active.get(batch.origin)
        if state is None or state.owner != owner or state.epoch != batch.epoch or owner == UNKNOWN_OWNER:
            return None
        return state

    def note_appended(
        self,
        state: OriginState,
        batch: Batch,
        offset: int,
        now: float,
        first_offsets: Mapping[int, int | None] | None = None,
    ) -> None:
        """Note an appended batch; see `OriginState.note_appended`."""
        state.seen_at = now
        self._active.move_to_end(batch.origin)
        self._count_ranges(state.note_appended(batch, offset, first_offsets))

    def note_appended_run(
        self, state: OriginState, batches: Sequence[Batch], offset: int, now: float
    ) -> None:
        """Note appended batches; see `OriginState.note_appended_run`."""
        state.seen_at = now
        self._active.move_to_end(batches[0].origin)
        self._count_ranges(state.note_appended_run(batches, offset))

    def _count_ranges(self, added_count: int) -> None:
        self._range_count += added_count
        if self._range_count > OFFSET_RANGES_MAX:
            self._range_count -= max(self._active.values(), key=attrgetter("range_count")).drop_older_ranges()

    def deactivate_idle(self, now: float, idle_s_max: float = IDLE_S_MAX) -> int:
        """Deactivate origins not seen for `idle_s_max` seconds; return their number."""
        count = 0
        while self._active:
            origin, state = next(iter(self._active.items()))
            if now - state.seen_at < idle_s_max:
                break
            if state.owner == OWN:
                state.seen_at = now
                self._active.move_to_end(origin)
                continue
            del self._active[origin]
            self._range_count -= state.range_count
            self._idle[origin] = (state.owner, state.epoch)
            count += 1
        return count
