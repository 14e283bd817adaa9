"""The orderer against a model that scans all pending entries at each step.

The model has no index: readiness, release, refusal, capacity and time come from plain lists.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from delta_prop.partition.order.orderer import Entry, Orderer, Verdict
from delta_prop_wire.delta import Dot
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

DELTAS_MAX, OWNER_MAX, UNRESERVED_MAX = 16, 8, 13
PENDING_TIMEOUT_S = 10.0
ORIGINS = (1, 2, 3)
IDS = tuple(bytes([n]) * 16 for n in range(4))

dots = st.builds(Dot, st.sampled_from(ORIGINS), st.integers(1, 12))


class KnownIds(set):
    """Known ids that the machine adds."""

    kept_since = 0


class ListModel:
    """A model of the orderer made of plain lists."""

    def __init__(self):
        self.watermarks = dict.fromkeys(ORIGINS, 0)
        self.ids = set()
        self.pending = []  # (entry, deadline), in order of arrival
        self.log = []

    def missing(self, entry):
        """Return the dots and the ids that an entry waits for."""
        dots = [dot for dot in entry.clock if dot.origin != entry.origin]
        dots += [
            parent
            for parent in entry.parents
            if isinstance(parent, tuple)
            and not (parent.origin == entry.origin and parent.counter <= entry.last)
        ]
        predecessor = Dot(entry.origin, entry.previous)
        ids = {p for p in entry.parents if isinstance(p, bytes)} - set(entry.ids) - self.ids
        return {dot for dot in [*dots, predecessor] if dot.counter > self.watermarks[dot.origin]}, ids

    def is_next(self, entry):
        return self.missing(entry) == (set(), set()) and self.watermarks[entry.origin] == entry.previous

    def depends_on(self, entry, root):
        dots, ids = self.missing(entry)
        is_successor = any(dot.origin == root.origin and dot.counter >= root.first for dot in dots)
        return is_successor or bool(ids & set(root.ids))

    def take_dependents(self, root):
        """Remove and return all direct and indirect dependents."""
        roots, removed = [root], []
        while roots:
            head = roots.pop()
            for pair in [pair for pair in self.pending if self.depends_on(pair[0], head)]:
                self.pending.remove(pair)
                removed.append(pair)
                roots.append(pair[0])
        return [entry for entry, _ in removed]

    def has_capacity(self, entry):
        is_awaited = any(self.depends_on(other, entry) for other, _ in self.pending)
        used = sum(other.count for other, _ in self.pending)
        owned = sum(other.count for other, _ in self.pending if other.owner == entry.owner)
        has_space = used + entry.count <= (DELTAS_MAX if is_awaited else UNRESERVED_MAX)
        return has_space and owned + entry.count <= OWNER_MAX

    def append(self, entry):
        """Append an entry and those it releases, in order of arrival; remove and return overtaken ones."""
        queue, overtaken = [entry], []
        while queue:
            entry = queue.pop(0)
            self.log.append(entry)
            self.watermarks[entry.origin] = entry.last
            self.ids.update(entry.ids)
            now_overtaken = [
                other for other, _ in self.pending if other.previous < self.watermarks[other.origin]
            ]
            overtaken += now_overtaken
            ready = [other for other, _ in self.pending if other not in now_overtaken and self.is_next(other)]
            self.pending = [
                pair for pair in self.pending if pair[0] not in now_overtaken and pair[0] not in ready
            ]
            queue += ready
        return overtaken


class OrdererMachine(RuleBasedStateMachine):
    """Gives the orderer and the model the same entries, and compares answers, order and pending entries."""

    @initialize()
    def start(self):
        self.now = 0.0
        self.model = ListModel()
        self.known = KnownIds()
        self.log = []
        self.orderer = Orderer(
            self.known,
            pending_deltas_max=DELTAS_MAX,
            pending_timeout_s=PENDING_TIMEOUT_S,
            owner_share=OWNER_MAX / DELTAS_MAX,
            reserve_share=(DELTAS_MAX - UNRESERVED_MAX) / DELTAS_MAX,
        )

    @rule(
        origin=st.sampled_from(ORIGINS),
        ahead=st.integers(0, 6),
        count=st.integers(1, 3),
        gap=st.integers(0, 1),
        clock=st.lists(dots, max_size=2),
        parents=st.lists(st.one_of(dots, st.sampled_from(IDS)), max_size=2),
        ids=st.lists(st.sampled_from(IDS), max_size=1),
        owner=st.sampled_from("xy"),
        fails=st.sampled_from([False] * 7 + [True]),
    )
    def offer(self, *, origin, ahead, count, gap, clock, parents, ids, owner, fails):
        previous = self.model.watermarks[origin] + ahead
        first = previous + 1 + gap
        entry = Entry(
            origin, first, first + count - 1, previous, count, 100, owner, None, clock, tuple(parents), ids
        )
        is_next = self.model.is_next(entry)
        assert self.orderer.check(entry) == is_next
        pending = next(
            (e for e, _ in self.model.pending if (e.origin, e.previous) == (origin, previous)), None
        )
        assert self.orderer.find_pending(entry) is pending
        if is_next and fails:
            self.fail(entry)
        elif is_next:
            self.append(entry)
        elif pending is None:
            self.hold_pending(entry)

    @rule(origin=st.sampled_from(ORIGINS))
    def append_next(self, origin):
        first = self.model.watermarks[origin] + 1
        self.append(Entry(origin, first, first, first - 1, 1, 100, "z", None))

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
    def wait(self, seconds):
        self.now += seconds
        refused = []
        while self.model.pending and self.model.pending[0][1] <= self.now:
            root, _ = self.model.pending.pop(0)
            refused += [root, *self.model.take_dependents(root)]
        refused_entries = self.orderer.expire(self.now)
        assert {id(entry) for entry, _ in refused_entries} == set(map(id, refused))
        assert all(error.code is ErrorCode.DEP_TIMEOUT for _, error in refused_entries)

    @rule(index=st.integers(0, 20))
    def withdraw(self, index):
        if not self.model.pending:
            return
        pair = self.model.pending[index % len(self.model.pending)]
        entry = pair[0]
        assert self.orderer.withdraw(entry, self.now)
        self.model.pending.remove(pair)
        if self.model.is_next(entry):
            assert self.orderer.next_ready() is entry
            self.append(entry)
        else:
            self.model.pending.append((entry, self.now + PENDING_TIMEOUT_S))

    @rule(origin=st.sampled_from(ORIGINS))
    def fence(self, origin):
        taken = self.orderer.take_origin(origin)
        expected = [entry for entry, _ in self.model.pending if entry.origin == origin]
        assert taken == sorted(expected, key=lambda entry: entry.previous)
        self.model.pending = [pair for pair in self.model.pending if pair[0].origin != origin]

    @invariant()
    def same_entries_are_pending(self):
        pending = [entry for entry, _ in self.model.pending]
        statistics = self.orderer.statistics()
        assert statistics.pending_runs == len(pending)
        assert statistics.pending_deltas == sum(entry.count for entry in pending) <= DELTAS_MAX
        assert statistics.pending_owners == len({entry.owner for entry in pending})
        assert statistics.awaited_ids == len(
            set().union(*(self.model.missing(entry)[1] for entry in pending))
        )
        awaited = {entry.origin for entry in pending}
        awaited |= {dot.origin for entry in pending for dot in self.model.missing(entry)[0]}
        assert statistics.awaited_origins == len(awaited)
        assert bool(statistics.index_length) == bool(pending)
        assert self.orderer.next_deadline() == min(
            (deadline for _, deadline in self.model.pending), default=None
        )

    @invariant()
    def same_entries_were_appended(self):
        assert list(map(id, self.log)) == list(map(id, self.model.log))
        assert {o: c for o, c in self.model.watermarks.items() if c} == self.orderer.watermarks

    def append(self, entry):
        overtaken = self.model.append(entry)
        not_appended, queue = [], [entry]
        while queue:
            entry = queue.pop()
            self.log.append(entry)
            self.known.update(entry.ids)
            self.orderer.note_delivered(entry.origin, entry.last, entry.ids)
            while not queue and (released := self.orderer.next_ready()) is not None:
                if released.verdict is Verdict.APPEND:
                    queue.append(released)
                else:
                    is_fully_overtaken = released.last <= self.orderer.watermarks[released.origin]
                    assert (released.verdict is Verdict.DUPLICATE) == is_fully_overtaken
                    not_appended.append(released)
        assert set(map(id, not_appended)) == set(map(id, overtaken))

    def hold_pending(self, entry):
        if self.model.has_capacity(entry):
            self.model.pending.append((entry, self.now + PENDING_TIMEOUT_S))
            assert self.orderer.hold_pending(entry, self.now) == []
            return
        dependents = self.model.take_dependents(entry)
        self.check_refusals(
            self.orderer.hold_pending(entry, self.now), entry, dependents, ErrorCode.PENDING_FULL
        )

    def fail(self, entry):
        dependents = self.model.take_dependents(entry)
        error = Refused(ErrorCode.LOG_FULL, "full", retry_after_ms=5)
        self.check_refusals(self.orderer.refuse(entry, error), entry, dependents, ErrorCode.LOG_FULL)

    def check_refusals(self, refused_entries, root, dependents, code):
        assert refused_entries[0].entry is root
        assert {id(entry) for entry, _ in refused_entries[1:]} == set(map(id, dependents))
        assert len(refused_entries) == len(dependents) + 1
        assert all(error.code is code for _, error in refused_entries)
        assert all(
            error.details["blocked_by"] == f"{root.origin:016x}:{root.first}"
            for _, error in refused_entries[1:]
        )


TestOrdererModel = OrdererMachine.TestCase
TestOrdererModel.settings = settings(stateful_step_count=60)
