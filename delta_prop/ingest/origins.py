"""Origins: who may write under which epoch, and what each has written.

Pure. The watermark itself, the highest delivered counter, lives in the orderer, where dedup and
order are one comparison; here stands what surrounds it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from delta_prop.ingest.epochs import (
    CLAIMED_MAX,
    EPOCH_MAX,
    SPARE,
    fenced_by,
    not_believed,
    not_reserved,
    of_another,
    used_up,
)
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from delta_prop_wire.batch import Batch
    from delta_prop_wire.frames import OriginClaim

OWN = ""
"""Owner of the service's own origins, which are never idle."""
ORIGINS_MAX = 100_000
ORIGINS_PER_OWNER_MAX = 1_000
IDLE_S_MAX = 7 * 24 * 3600.0
IDLE_TIMES = 10
"""Idle origins kept, as a multiple of the active ones."""
RECENT_BATCHES = 64
VOIDS_MAX = 10_000
"""Void runs remembered for each origin; an older one is answered as a repeat without an offset."""
RUNS_MAX = 2_000_000
"""Runs of first offsets kept over all origins, 24 bytes each."""


UNKNOWN_OWNER = "\0"
"""Whose an origin is that a log names, until it says hello again."""


class SavedOrigin(NamedTuple):
    """What is known of one origin, as arrays: (bases, lasts, checksums) of recent batches, (bases, lasts,
    offsets) of runs, (bases, lasts, codes) of voids.
    """

    epoch: int
    known_above: int
    forgot: bool
    recent: tuple[array[int], array[int], array[int]]
    runs: tuple[array[int], array[int], array[int]]
    voids: tuple[array[int], array[int], array[int]]


def _columns(kinds: str) -> tuple[array[int], array[int], array[int]]:
    one, two, three = (array(kind) for kind in kinds)
    return one, two, three


@dataclass(slots=True)
class OriginColumns:
    """Many active origins end to end, as a checkpoint has them: no object for each of them is made."""

    epochs: array[int] = field(default_factory=partial(array, "Q"))
    known_above: array[int] = field(default_factory=partial(array, "Q"))
    forgot: array[int] = field(default_factory=partial(array, "B"))
    recent_counts: array[int] = field(default_factory=partial(array, "Q"))
    runs_counts: array[int] = field(default_factory=partial(array, "Q"))
    voids_counts: array[int] = field(default_factory=partial(array, "Q"))
    recent: tuple[array[int], array[int], array[int]] = field(default_factory=partial(_columns, "QQI"))
    runs: tuple[array[int], array[int], array[int]] = field(default_factory=partial(_columns, "QQQ"))
    voids: tuple[array[int], array[int], array[int]] = field(default_factory=partial(_columns, "QQI"))


class OriginState:
    """What is known of one origin beside its watermark."""

    __slots__ = (
        "_bases",
        "_crcs",
        "_forgot",
        "_lasts",
        "_run_bases",
        "_run_lasts",
        "_run_offsets",
        "_runs_saved",
        "_void_bases",
        "_void_codes",
        "_void_lasts",
        "changed",
        "claims",
        "epoch",
        "known_above",
        "owner",
        "seen_at",
    )

    def __init__(self, owner: str, epoch: int, now: float, known_above: int = 0) -> None:
        self.owner = owner
        self.epoch = epoch
        self.claims = 0  # hellos over the network, each of which sends anew what has no outcome
        self.seen_at = now
        self.known_above = known_above  # what became of dots up to here left memory while it was idle
        self.changed = True  # since it was saved last
        self._runs_saved = 0  # that will not change any more
        self._forgot = False
        self._bases, self._lasts, self._crcs = array("Q"), array("Q"), array("I")
        self._run_bases, self._run_lasts, self._run_offsets = array("Q"), array("Q"), array("Q")
        self._void_bases, self._void_lasts, self._void_codes = array("Q"), array("Q"), array("I")

    def appended(self, batch: Batch, offset: int, firsts: Mapping[int, int | None] | None = None) -> int:
        """Note a batch that got its place; return by how many runs the table grew.

        `firsts`: where the rows' first copies stand, if their ids had been accepted before; None: not known.
        """
        self.changed = True
        self.remember(batch.base, batch.last, batch.crc)
        if firsts is None and not batch.leaps:
            return self._extend(batch.base, offset, batch.count)
        if firsts is not None:
            for row, at in firsts.items():
                if at is None:
                    self._note_void(batch.counter(row), batch.counter(row), ErrorCode.OUTCOME_UNKNOWN)
            known = ((row, at) for row, at in firsts.items() if at is not None)
            return sum(self._extend(batch.counter(row), at) for row, at in known)
        counters = batch.counters
        assert counters is not None
        return sum(self._extend(int(counter), offset + row) for row, counter in enumerate(counters))

    def appended_run(self, batches: Sequence[Batch], offset: int) -> int:
        """`appended` for batches whose counters and offsets go on from one to the next, without leaps."""
        self.changed = True
        rows = 0
        for batch in batches:
            self.remember(batch.base, batch.base + batch.count - 1, batch.crc)
            rows += batch.count
        return self._extend(batches[0].base, offset, rows)

    def note_void(self, batch: Batch, code: ErrorCode) -> None:
        """Remember that these dots were refused for good: a repeat is refused again, not acknowledged."""
        self._note_void(batch.base, batch.last, code)

    def _note_void(self, base: int, last: int, code: ErrorCode) -> None:
        if len(self._void_bases) >= VOIDS_MAX:
            for column in (self._void_bases, self._void_lasts, self._void_codes):
                del column[: VOIDS_MAX // 2]
        self._void_bases.append(base)
        self._void_lasts.append(last)
        self._void_codes.append(code)

    def first_void(self, batch: Batch) -> tuple[int, ErrorCode] | None:
        """Return the first of these counters whose dot is void, and why; None if none is."""
        place = bisect_left(self._void_lasts, batch.base)
        if place == len(self._void_bases) or self._void_bases[place] > batch.last:
            return None
        return max(batch.base, self._void_bases[place]), ErrorCode(self._void_codes[place])

    def outcome(self, counter: int) -> int | ErrorCode | None:
        """Where the delta with this counter stands, or why its dot is void; None where memory does not tell.

        DOT_REUSED where its producer left the counter out.
        """
        found = self._void(counter, counter) or self.first_offset(counter)
        left_out = bool(self._run_bases and self._run_bases[0] < counter)
        return ErrorCode.DOT_REUSED if found is None and left_out and not self._lacks_void(counter) else found

    def _lacks_void(self, counter: int) -> bool:
        """True if the counter may be of a void that was dropped from memory."""
        return len(self._void_bases) >= VOIDS_MAX // 2 and counter < self._void_bases[0]

    def _void(self, base: int, last: int) -> ErrorCode | None:
        place = bisect_right(self._void_bases, last) - 1
        if place < 0 or self._void_lasts[place] < base:
            return None
        return ErrorCode(self._void_codes[place])

    def first_offset(self, counter: int) -> int | None:
        """Where the delta with this counter stands; None where that is not kept, or never was."""
        place = bisect_right(self._run_bases, counter) - 1
        if place < 0 or counter > self._run_lasts[place] or self._lacks_void(counter):
            return None
        return self._run_offsets[place] + counter - self._run_bases[place]

    def first_offset_above(self, counter: int) -> int | None:
        """Where the first delta behind a counter stands, or one before it; None where that is not kept."""
        place = bisect_right(self._run_lasts, counter)
        bases, lasts, offsets = self._run_bases, self._run_lasts, self._run_offsets
        if place == len(lasts) or counter < self.known_above or (place == 0 and self._forgot):
            return None
        offset = offsets[place] + max(counter + 1 - bases[place], 0)
        if place == 0:
            return offset
        # Of a repeat under a new dot the first copy is remembered, which stands further back.
        return max(offset, offsets[place - 1] + lasts[place - 1] - bases[place - 1] + 1)

    def same_frame(self, batch: Batch) -> bool | None:
        """Whether this repeat is a frame that was sent; None: the last 64 batches do not tell.

        A producer repeats the same frames. Other cuts of known dots cannot be told from their checksums.
        """
        recent = slice(-RECENT_BATCHES, None)
        told = [
            crc
            for base, last, crc in zip(
                self._bases[recent], self._lasts[recent], self._crcs[recent], strict=True
            )
            if base == batch.base and last == batch.last
        ]
        return batch.crc in told if told else None

    @property
    def runs(self) -> int:
        """How many runs of first offsets it keeps."""
        return len(self._run_bases)

    def forget_half_of_runs(self) -> int:
        """Drop the older half of the first offsets; return how many runs that were."""
        half = len(self._run_bases) // 2
        for column in (self._run_bases, self._run_lasts, self._run_offsets):
            del column[:half]
        self._runs_saved = max(self._runs_saved - half, 0)
        self._forgot = True
        return half

    def save(self, into: OriginColumns, *, whole: bool) -> None:
        """Add it to columns for a checkpoint; without `whole`, of its runs those alone that changed since."""
        first = 0 if whole else self._runs_saved
        self.changed = False
        self._runs_saved = max(len(self._run_bases) - 1, 0)  # the last one may go on
        recent = slice(-RECENT_BATCHES, None)
        into.epochs.append(self.epoch)
        into.known_above.append(self.known_above)
        into.forgot.append(self._forgot)
        bases, lasts, crcs = into.recent
        bases.extend(self._bases[recent])
        lasts.extend(self._lasts[recent])
        crcs.extend(self._crcs[recent])
        into.recent_counts.append(min(len(self._bases), RECENT_BATCHES))
        bases, lasts, offsets = into.runs
        bases.extend(self._run_bases[first:])
        lasts.extend(self._run_lasts[first:])
        offsets.extend(self._run_offsets[first:])
        into.runs_counts.append(len(self._run_bases) - first)
        bases, lasts, codes = into.voids
        bases.extend(self._void_bases)
        lasts.extend(self._void_lasts)
        codes.extend(self._void_codes)
        into.voids_counts.append(len(self._void_bases))

    @classmethod
    def restored(cls, saved: SavedOrigin, now: float) -> OriginState:
        """What `save` made, whole; whose it is is known when it says hello again."""
        state = cls(UNKNOWN_OWNER, saved.epoch, now, saved.known_above)
        state._forgot = saved.forgot
        state._bases, state._lasts, state._crcs = saved.recent
        state._run_bases, state._run_lasts, state._run_offsets = saved.runs
        state._void_bases, state._void_lasts, state._void_codes = saved.voids
        state._runs_saved = max(len(state._run_bases) - 1, 0)
        state.changed = False
        return state

    def remember(self, base: int, last: int, crc: int) -> None:
        """Keep the checksum of these dots' bytes, to tell a repeat from a reuse."""
        if len(self._bases) >= 2 * RECENT_BATCHES:  # cut now and then, not at each batch
            for column in (self._bases, self._lasts, self._crcs):
                del column[:RECENT_BATCHES]
        self._bases.append(base)
        self._lasts.append(last)
        self._crcs.append(crc)

    def _extend(self, base: int, offset: int, count: int = 1) -> int:
        bases, lasts, offsets = self._run_bases, self._run_lasts, self._run_offsets
        if bases and base == lasts[-1] + 1 and base - bases[-1] == offset - offsets[-1]:
            lasts[-1] = base + count - 1  # goes on where the last run ended, in counters and in offsets
            return 0
        bases.append(base)
        lasts.append(base + count - 1)
        offsets.append(offset)
        return 1


@dataclass(frozen=True, slots=True)
class Grant:
    """What a hello gives for one origin: the epoch to write under, and the watermark so far."""

    origin: int
    epoch: int
    watermark: int


class Origins:
    """All origins, bounded per owner and in all; idle ones are put aside, never forgotten."""

    def __init__(
        self,
        *,
        origins_max: int = ORIGINS_MAX,
        per_owner_max: int = ORIGINS_PER_OWNER_MAX,
        epochs_above: int = 0,
        epochs_until: int = EPOCH_MAX,
    ) -> None:
        """`epochs_above`, `epochs_until`: a new epoch lies between them, the last one included, whatever is
        known of its origin.
        """
        self.epochs_wanted = 0
        """The highest epoch that is to be set aside, as those up to `epochs_until` are; 0: no more are."""
        self._epochs_above = epochs_above
        self._epochs_until = epochs_until
        self._origins_max = origins_max
        self._per_owner_max = per_owner_max
        self._active: OrderedDict[int, OriginState] = OrderedDict()  # least recently seen first
        self._idle: dict[int, tuple[str, int]] = {}  # bounded too, since nothing of it may be forgotten
        self._owned: dict[str, int] = {}
        self._runs = 0

    def __len__(self) -> int:
        return len(self._active) + len(self._idle)

    def check_room(self, origins: Iterable[int], owner: str, *, bounded: bool = True) -> None:
        """Raise Refused (RATE_LIMITED) where these are too many, for this owner (if `bounded`) or in all."""
        new = sum(origin not in self._active and origin not in self._idle for origin in origins)
        held = self._owned.get(owner, 0)
        full = len(self._active) + new > self._origins_max or len(self._idle) > IDLE_TIMES * self._origins_max
        if new and (full or (bounded and held + new > self._per_owner_max)):
            raise Refused(
                ErrorCode.RATE_LIMITED,
                f"{held} origins of {self._per_owner_max} for {owner!r}, {len(self._active)} of "
                f"{self._origins_max} in all: use fewer producer names (each has an origin a priority)",
                retry_after_ms=60_000,
                details={"depth": len(self._active), "capacity": self._origins_max},
            )

    def hello(self, origin: int, owner: str, now: float, watermark: int = 0) -> OriginState:
        """Grant the next epoch; whoever wrote under the one before is fenced. Ask `check_room` before.

        Raises Refused (RATE_LIMITED) while no more epochs are set aside, BAD_REQUEST where none are left.
        """
        return self._grant(origin, owner, self._next_epoch(origin), now, watermark)

    def claim(self, origin: int, epoch: int, owner: str, now: float, watermark: int) -> OriginState:
        """Grant the epoch that a producer holds (0: none, so a new one) while nobody has a later one.

        One that is not known here is believed: a former life of this log may have granted it, or a log that
        is lost. Raises Refused (FENCED, UNAUTHORIZED; BAD_REQUEST for one that would leave too few; as
        `hello` does). Ask `check_room` before.
        """
        return self._grant(origin, owner, self._claimed_epoch(origin, epoch, owner), now, watermark)

    def check_claims(self, claims: Sequence[OriginClaim], owner: str, *, bounded: bool) -> None:
        """Raise Refused as `check_room` and `claim` would, before any is granted: so that a hello which is
        refused fences nobody.
        """
        self.check_room([claim.origin for claim in claims], owner, bounded=bounded)
        for claim in claims:
            self._claimed_epoch(claim.origin, claim.epoch, owner)

    def _claimed_epoch(self, origin: int, epoch: int, owner: str) -> int:
        self.check_owner(origin, owner)
        if epoch == 0:
            return self._next_epoch(origin)
        present = self._present(origin)
        if epoch < present:
            raise fenced_by(origin, epoch, present)
        if epoch > present and epoch > self._epochs_above:
            if epoch > CLAIMED_MAX:
                raise not_believed(origin, epoch)
            self._check_set_aside(origin, epoch)
        return epoch

    def note_forwarded(self, origin: int, owner: str, epoch: int, now: float, watermark: int) -> None:
        """Note an origin of which another service's log tells for the first time. Ask `check_room` before."""
        self._grant(origin, owner, epoch, now, watermark)

    def note_reserved(self, epochs_until: int) -> None:
        """Note that all epochs up to there are set aside, on disk: the next opening begins above them."""
        self._epochs_until = epochs_until
        if epochs_until >= self.epochs_wanted:
            self.epochs_wanted = 0

    def _next_epoch(self, origin: int) -> int:
        epoch = max(self._present(origin), self._epochs_above) + 1
        self._check_set_aside(origin, epoch)
        return epoch

    def _present(self, origin: int) -> int:
        known = self._active.get(origin)
        return known.epoch if known is not None else self._idle.get(origin, ("", 0))[1]

    def _check_set_aside(self, origin: int, epoch: int) -> None:
        """Raise Refused where an epoch could come again after a crash; want more while there are few left."""
        until = self._epochs_until
        if epoch <= until - SPARE:
            return
        if epoch > max(CLAIMED_MAX, until) + SPARE or epoch > EPOCH_MAX:
            raise used_up(origin)
        self.epochs_wanted = max(self.epochs_wanted, epoch + SPARE)
        if epoch > until:
            raise not_reserved(origin, epoch)

    def check_owner(self, origin: int, owner: str) -> None:
        """Raise Refused (UNAUTHORIZED) where the origin is somebody else's."""
        known = self._active.get(origin)
        holder = known.owner if known is not None else self._idle.get(origin, (UNKNOWN_OWNER, 0))[0]
        if holder not in (owner, UNKNOWN_OWNER):
            raise of_another(origin)

    def restore(self, origin: int, epoch: int, now: float) -> OriginState:
        """The state of an origin that a log names; it writes again once it has said hello."""
        state = self._active.get(origin)
        if state is None:
            state = self._active[origin] = OriginState(UNKNOWN_OWNER, epoch, now)
            self._owned[UNKNOWN_OWNER] = self._owned.get(UNKNOWN_OWNER, 0) + 1
        state.epoch = max(state.epoch, epoch)
        return state

    def carry_over(self, before: Origins) -> None:
        """Keep what was granted before the log failed: who holds which origin, under which epoch."""
        for origin, state in before._active.items():
            if state.owner not in (OWN, UNKNOWN_OWNER):
                self._grant(origin, state.owner, state.epoch, state.seen_at, state.known_above)
        for origin, (owner, epoch) in before._idle.items():
            if origin in self._active:
                self._grant(origin, owner, epoch, self._active[origin].seen_at, 0)
            elif origin not in self._idle:
                self._idle[origin] = (owner, epoch)
                self._owned[owner] = self._owned.get(owner, 0) + 1

    def _grant(self, origin: int, owner: str, epoch: int, seen_at: float, known_above: int) -> OriginState:
        """Let an owner write under an epoch, or a higher one that is known."""
        state = self._active.get(origin)
        if state is None:
            former = self._idle.pop(origin, None)
            state = self._active[origin] = OriginState(owner, epoch, seen_at, known_above)
            if former is not None and former[0] != UNKNOWN_OWNER:
                self._owned[former[0]] -= 1
        else:
            self._owned[state.owner] -= 1
            state.seen_at = max(state.seen_at, seen_at)
            self._active.move_to_end(origin)
        state.owner, state.epoch, state.changed = owner, max(state.epoch, epoch), True
        self._owned[owner] = self._owned.get(owner, 0) + 1
        return state

    def all(self) -> tuple[list[int], dict[int, tuple[str, int]]]:
        """The origins that are active, and (owner, epoch) of those put aside; copies."""
        return list(self._active), dict(self._idle)

    def take_back(self, active: Mapping[int, OriginState], idle: Mapping[int, int]) -> None:
        """Begin with what a checkpoint holds: states of active origins, epochs of those put aside."""
        for origin, state in active.items():
            if origin not in self._active:
                self._active[origin] = state
                self._runs += state.runs
                self._owned[UNKNOWN_OWNER] = self._owned.get(UNKNOWN_OWNER, 0) + 1
        for origin, epoch in idle.items():
            self._idle.setdefault(origin, (UNKNOWN_OWNER, epoch))

    def get(self, origin: int) -> OriginState | None:
        """The state of an origin that said hello and is not idle."""
        return self._active.get(origin)

    def require(self, batch: Batch, owner: str, *, repeat: bool = False) -> OriginState:
        """The state of a batch's origin. Raises Refused (UNKNOWN_ORIGIN, FENCED, UNAUTHORIZED).

        A `repeat` may come under an epoch of before: its producer said hello again, and sends the same frame.
        """
        state = self._active.get(batch.origin)
        if state is None or state.owner == UNKNOWN_OWNER or batch.epoch > state.epoch:
            raise Refused(
                ErrorCode.UNKNOWN_ORIGIN,
                f"origin {batch.origin:016x} epoch {batch.epoch} is not known here: say hello again",
                details={"origin": batch.origin},
            )
        if owner != state.owner:
            raise of_another(batch.origin)
        if batch.epoch < state.epoch and not repeat:
            raise fenced_by(batch.origin, batch.epoch, state.epoch)
        return state

    def writer(self, batch: Batch, owner: str) -> OriginState | None:
        """The state of a batch's origin where this owner may write under it; `require` says why not."""
        state = self._active.get(batch.origin)
        if state is None or state.owner != owner or state.epoch != batch.epoch or owner == UNKNOWN_OWNER:
            return None
        return state

    def appended(
        self,
        state: OriginState,
        batch: Batch,
        offset: int,
        now: float,
        firsts: Mapping[int, int | None] | None = None,
    ) -> None:
        """Note a batch that got its place; see `OriginState.appended`."""
        state.seen_at = now
        self._active.move_to_end(batch.origin)
        self._note_runs(state.appended(batch, offset, firsts))

    def appended_run(self, state: OriginState, batches: Sequence[Batch], offset: int, now: float) -> None:
        """Note batches that got their places; see `OriginState.appended_run`."""
        state.seen_at = now
        self._active.move_to_end(batches[0].origin)
        self._note_runs(state.appended_run(batches, offset))

    def _note_runs(self, count: int) -> None:
        self._runs += count
        if self._runs > RUNS_MAX:
            self._runs -= max(self._active.values(), key=_runs).forget_half_of_runs()

    def set_idle_aside(self, now: float, idle_s_max: float = IDLE_S_MAX) -> int:
        """Put aside what was not seen for `idle_s_max` seconds; return how many origins that were."""
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
            self._runs -= state.runs
            self._idle[origin] = (state.owner, state.epoch)
            count += 1
        return count


def _runs(state: OriginState) -> int:
    return state.runs
