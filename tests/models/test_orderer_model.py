"""The orderer beside a model that looks through all that is pending at each step.

The model knows no index: readiness, release, refusal, room and time are read off plain lists.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from delta_prop.order import Entry, Orderer, Verdict
from delta_prop_wire.delta import Dot
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

DELTAS_MAX, OWNER_MAX, OPEN_MAX = 16, 8, 13
TIME_S = 10.0
ORIGINS = (1, 2, 3)
IDS = tuple(bytes([n]) * 16 for n in range(4))

dots = st.builds(Dot, st.sampled_from(ORIGINS), st.integers(1, 12))


class Model:
    """Lists only."""

    def __init__(self):
        self.have = dict.fromkeys(ORIGINS, 0)
        self.ids = set()
        self.pending = []  # (entry, deadline), in order of arrival
        self.log = []

    def waits(self, entry):
        """The dots and ids an entry waits for."""
        dots = [dot for dot in entry.clock if dot.origin != entry.origin]
        dots += [
            parent
            for parent in entry.parents
            if isinstance(parent, tuple)
            and not (parent.origin == entry.origin and parent.counter <= entry.last)
        ]
        own = [Dot(entry.origin, entry.previous)]
        ids = {p for p in entry.parents if isinstance(p, bytes)} - set(entry.ids) - self.ids
        return {dot for dot in dots + own if dot.counter > self.have[dot.origin]}, ids

    def is_next(self, entry):
        return self.waits(entry) == (set(), set()) and self.have[entry.origin] == entry.previous

    def is_behind(self, entry, root):
        dots, ids = self.waits(entry)
        later = any(dot.origin == root.origin and dot.counter >= root.first for dot in dots)
        return later or bool(ids & set(root.ids))

    def behind(self, root):
        """Everything pending that stands behind, directly or not; it leaves."""
        roots, held = [root], []
        while roots:
            head = roots.pop()
            for pair in [pair for pair in self.pending if self.is_behind(pair[0], head)]:
                self.pending.remove(pair)
                held.append(pair)
                roots.append(pair[0])
        return [entry for entry, _ in held]

    def has_room(self, entry):
        wanted = any(self.is_behind(other, entry) for other, _ in self.pending)
        used = sum(other.count for other, _ in self.pending)
        owned = sum(other.count for other, _ in self.pending if other.owner == entry.owner)
        room = used + entry.count <= (DELTAS_MAX if wanted else OPEN_MAX)
        return room and owned + entry.count <= OWNER_MAX

    def append(self, entry):
        """Append, then what that releases, first what arrived first; overtaken ones leave too."""
        queue, overtaken = [entry], []
        while queue:
            entry = queue.pop(0)
            self.log.append(entry)
            self.have[entry.origin] = entry.last
            self.ids.update(entry.ids)
            gone = [other for other, _ in self.pending if other.previous < self.have[other.origin]]
            overtaken += gone
            ready = [other for other, _ in self.pending if other not in gone and self.is_next(other)]
            self.pending = [pair for pair in self.pending if pair[0] not in gone and pair[0] not in ready]
            queue += ready
        return overtaken


class OrdererMachine(RuleBasedStateMachine):
    """Both get the same entries; answers, order and what is pending must agree."""

    @initialize()
    def start(self):
        self.now = 0.0
        self.model = Model()
        self.known = set()
        self.log = []
        self.order = Orderer(
            knows_id=self.known.__contains__,
            pending_deltas_max=DELTAS_MAX,
            pending_timeout_s=TIME_S,
            owner_share=OWNER_MAX / DELTAS_MAX,
            reserve_share=(DELTAS_MAX - OPEN_MAX) / DELTAS_MAX,
        )

    @rule(
        origin=st.sampled_from(ORIGINS),
        ahead=st.integers(0, 6),
        count=st.integers(1, 3),
        leap=st.integers(0, 1),
        clock=st.lists(dots, max_size=2),
        parents=st.lists(st.one_of(dots, st.sampled_from(IDS)), max_size=2),
        ids=st.lists(st.sampled_from(IDS), max_size=1),
        owner=st.sampled_from("xy"),
        fails=st.sampled_from([False] * 7 + [True]),
    )
    def offer(self, *, origin, ahead, count, leap, clock, parents, ids, owner, fails):
        previous = self.model.have[origin] + ahead
        first = previous + 1 + leap
        entry = Entry(
            origin, first, first + count - 1, previous, count, 100, owner, None, clock, tuple(parents), ids
        )
        is_next = self.model.is_next(entry)
        assert self.order.check(entry) == is_next
        twin = next((e for e, _ in self.model.pending if (e.origin, e.previous) == (origin, previous)), None)
        assert self.order.find_parked(entry) is twin
        if is_next and fails:
            self.fail(entry)
        elif is_next:
            self.append(entry)
        elif twin is None:
            self.park(entry)

    @rule(origin=st.sampled_from(ORIGINS))
    def send_the_next(self, origin):
        first = self.model.have[origin] + 1
        self.append(Entry(origin, first, first, first - 1, 1, 100, "z", None))

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
    def wait(self, seconds):
        self.now += seconds
        refused = []
        while self.model.pending and self.model.pending[0][1] <= self.now:
            root, _ = self.model.pending.pop(0)
            refused += [root, *self.model.behind(root)]
        answers = self.order.expire(self.now)
        assert {id(entry) for entry, _ in answers} == set(map(id, refused))
        assert all(error.code is ErrorCode.DEP_TIMEOUT for _, error in answers)

    @rule(which=st.integers(0, 20))
    def withdraw(self, which):
        if not self.model.pending:
            return
        pair = self.model.pending[which % len(self.model.pending)]
        entry = pair[0]
        assert self.order.withdraw(entry, self.now)
        self.model.pending.remove(pair)
        if self.model.is_next(entry):
            assert self.order.next_ready() is entry
            self.append(entry)
        else:
            self.model.pending.append((entry, self.now + TIME_S))

    @rule(origin=st.sampled_from(ORIGINS))
    def fence(self, origin):
        taken = self.order.take_origin(origin)
        mine = [entry for entry, _ in self.model.pending if entry.origin == origin]
        assert taken == sorted(mine, key=lambda entry: entry.previous)
        self.model.pending = [pair for pair in self.model.pending if pair[0].origin != origin]

    @invariant()
    def the_same_is_pending(self):
        pending = [entry for entry, _ in self.model.pending]
        now = self.order.statistics()
        assert now.pending_runs == len(pending)
        assert now.pending_deltas == sum(entry.count for entry in pending) <= DELTAS_MAX
        assert now.pending_owners == len({entry.owner for entry in pending})
        assert now.awaited_ids == len(set().union(*(self.model.waits(entry)[1] for entry in pending)))
        awaited = {entry.origin for entry in pending}
        awaited |= {dot.origin for entry in pending for dot in self.model.waits(entry)[0]}
        assert now.awaited_origins == len(awaited)
        assert bool(now.index_length) == bool(pending)
        assert self.order.next_deadline() == min((at for _, at in self.model.pending), default=None)

    @invariant()
    def the_same_was_appended(self):
        assert list(map(id, self.log)) == list(map(id, self.model.log))
        assert {o: c for o, c in self.model.have.items() if c} == self.order.watermarks

    def append(self, entry):
        overtaken = self.model.append(entry)
        found, queue = [], [entry]
        while queue:
            entry = queue.pop()
            self.log.append(entry)
            self.known.update(entry.ids)
            self.order.note_delivered(entry.origin, entry.last, entry.ids)
            while not queue and (released := self.order.next_ready()) is not None:
                if released.verdict is Verdict.APPEND:
                    queue.append(released)
                else:
                    whole = released.last <= self.order.watermarks[released.origin]
                    assert (released.verdict is Verdict.DUPLICATE) == whole
                    found.append(released)
        assert set(map(id, found)) == set(map(id, overtaken))

    def park(self, entry):
        if self.model.has_room(entry):
            self.model.pending.append((entry, self.now + TIME_S))
            assert self.order.park(entry, self.now) == []
            return
        behind = self.model.behind(entry)
        self.check_refusals(self.order.park(entry, self.now), entry, behind, ErrorCode.PENDING_FULL)

    def fail(self, entry):
        behind = self.model.behind(entry)
        error = Refused(ErrorCode.LOG_FULL, "full", retry_after_ms=5)
        self.check_refusals(self.order.refuse(entry, error), entry, behind, ErrorCode.LOG_FULL)

    def check_refusals(self, answers, root, behind, code):
        assert answers[0].entry is root
        assert {id(entry) for entry, _ in answers[1:]} == set(map(id, behind))
        assert len(answers) == len(behind) + 1
        assert all(error.code is code for _, error in answers)
        assert all(
            error.details["blocked_by"] == f"{root.origin:016x}:{root.first}" for _, error in answers[1:]
        )


TestOrdererModel = OrdererMachine.TestCase
TestOrdererModel.settings = settings(stateful_step_count=60)
