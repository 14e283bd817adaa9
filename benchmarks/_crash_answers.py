"""Records every answer that callers got, and holds each against the log once it is recovered and at rest.

A row is known by its key, which no other row has, so neither dots nor offsets have to be believed. Pure but
for `read_places`, which reads a log frame by frame from its files, with nothing opened or recovered.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks._crash_check import Verdict
from delta_prop_broker.log.beside.inspect import inspect
from delta_prop_broker.log.damage import LogDamaged
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from delta_prop.published import Published
    from delta_prop_broker.disk import Disk
    from delta_prop_wire.errors import DeltaPropError

KINDS = {
    "lost": "acknowledged, and not in the log",
    "moved": "acknowledged at another offset than it has",
    "nowhere": "acknowledged without an offset",
    "twice": "more than once in the log",
    "happened": "refused as not having happened, and in the log",
    "vague": "told that it may have happened, while there was time for the exact answer",
    "nameless": "told that it may have happened, without the dot to ask by",
    "outcome": "asked for by its dot, and answered wrongly",
    "counted": "counted by the watermark of a hello, and lost",
    "late": "answered after its deadline",
    "unanswered": "never answered",
    "damage": "the log at rest is damaged",
    "stuck": "the service or a caller did not come to its end",
}
"""What can be wrong, by the name under which it is counted."""


@dataclass(slots=True)
class Answer:
    """One answer to one call. `offsets`: row by row, None where an acknowledgement named none."""

    kind: str
    at_s: float
    offsets: list[int | None] = field(default_factory=list)
    duplicate: bool = False
    code: str = ""
    text: str = ""
    dot: tuple[int, int] | None = None


@dataclass(slots=True)
class Call:
    """Rows that share one fate, when they were asked for, and every answer to that.

    `level`: what an acknowledgement promises. `sent_s`: the last time they were sent; a refusal before that
    says nothing of what follows. `asked`: what later questions by the dot were answered with, an offset, or
    -1 for "not in the log". `excused`: nobody owes an answer, as the connection of a caller broke who does
    not send twice.
    """

    caller: str
    keys: list[str]
    level: int
    sent_s: float
    deadline_s: float | None = None
    answers: list[Answer] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    excused: bool = False


@dataclass(slots=True)
class Welcome:
    """The watermark that a hello was answered with."""

    caller: str
    origin: int
    watermark: int
    at_s: float


class Answers:
    """The record of one run. `now`: the time in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.calls: list[Call] = []
        self.welcomes: list[Welcome] = []
        self._now = now

    def call(self, caller: str, keys: Sequence[str], level: AckLevel, timeout_s: float | None = None) -> Call:
        """Note that rows are sent for the first time."""
        now = self._now()
        deadline = None if timeout_s is None else now + timeout_s
        call = Call(caller, list(keys), int(level), now, deadline)
        self.calls.append(call)
        return call

    def sent_again(self, call: Call) -> None:
        """Note that its caller sends it again, whatever it was told before."""
        call.sent_s = self._now()

    def published(self, call: Call, told: Published) -> None:
        """Note an acknowledgement as the library gives it."""
        offsets: list[int | None] = []
        fresh = told.offset
        for row in range(told.count):
            if row in told.duplicates:
                offsets.append(told.duplicates[row])
            else:
                offsets.append(fresh)
                fresh = None if fresh is None else fresh + 1
        self.acknowledged(call, offsets, duplicate=bool(told.duplicates))

    def acknowledged(self, call: Call, offsets: Sequence[int | None], *, duplicate: bool) -> None:
        """Note an acknowledgement, row by row."""
        call.answers.append(Answer("acknowledged", self._now(), list(offsets), duplicate))

    def refused(self, call: Call, refusal: DeltaPropError) -> None:
        """Note a refusal: it has not happened, or by its code nobody knows yet."""
        answer = Answer("refused", self._now(), code=type(refusal).__name__, text=str(refusal))
        call.answers.append(answer)
        if not isinstance(refusal, Refused):
            return
        answer.code, answer.text = refusal.code.name, refusal.message
        if refusal.code is ErrorCode.OUTCOME_UNKNOWN:
            answer.kind = "unknown"
        dot = refusal.details.get("dot")
        if isinstance(dot, list | tuple) and len(dot) == 2:
            answer.dot = (int(dot[0]), int(dot[1]))

    def welcomed(self, caller: str, origin: int, watermark: int) -> None:
        """Note what a hello was answered with."""
        self.welcomes.append(Welcome(caller, origin, watermark, self._now()))

    def plain(self) -> dict[str, Any]:
        """Return the record as JSON can hold it."""
        return {"calls": list(map(asdict, self.calls)), "welcomes": list(map(asdict, self.welcomes))}

    def take(self, plain: Mapping[str, Any]) -> None:
        """Add the record that another process kept."""
        for one in plain["calls"]:
            answers = [Answer(**answer) for answer in one["answers"]]
            for answer in answers:
                answer.dot = None if answer.dot is None else (answer.dot[0], answer.dot[1])
            self.calls.append(Call(**{**one, "answers": answers}))
        self.welcomes += [Welcome(**one) for one in plain["welcomes"]]


@dataclass(slots=True)
class Places:
    """A log as its files hold it: the offsets of each key, the key of each dot, counters by origin."""

    offsets: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    counters: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    damage: list[str] = field(default_factory=list)
    rows: int = 0


def read_places(disk: Disk) -> Places:
    """Read every row from the files of a data directory that nobody writes to."""
    places = Places()
    for found in inspect(disk):
        if isinstance(found, LogDamaged):
            places.damage.append(str(found))
            continue
        logged = found.logged
        batch = logged.batch
        for row in range(batch.count):
            places.counters[batch.origin].add(batch.counter(row))
            if not batch.is_control:
                places.offsets[batch.keys[row]].append(logged.offset + row)
                places.rows += 1
    return places


@dataclass(frozen=True, slots=True)
class Failures:
    """What is known of the failures beneath a run.

    `spared`: the lowest level whose acknowledgements they spare. `decided_s`: when the log was recovered for
    the last time; None: not known, so nobody is held to it. `undecided`: the log was closed, or stopped for
    good, before that. `late_s`: how much after its deadline an answer may come, as what is under way then is
    finished, on a machine that may be busy.
    """

    spared: AckLevel = AckLevel.LOGGED
    decided_s: float | None = None
    undecided: bool = False
    late_s: float = 0.5


def judge(places: Places, answers: Answers, failures: Failures) -> Verdict:
    """Hold every answer against the log at rest."""
    verdict = Verdict()
    for text in places.damage:
        verdict.add("damage", text)
    for call in answers.calls:
        for key in call.keys:
            if len(places.offsets.get(key, ())) > 1:
                verdict.add("twice", f"{call.caller}: {key} stands at {places.offsets[key]}")
        for answer in call.answers:
            _judge_answer(verdict, places, call, answer, failures)
        if not call.answers and not call.excused:
            verdict.add("unanswered", f"{call.caller}: {call.keys[0]}, sent at {call.sent_s:.3f} s")
        _judge_asked(verdict, places, call)
    _judge_welcomes(verdict, places, answers.welcomes)
    return verdict


def _judge_answer(verdict: Verdict, places: Places, call: Call, answer: Answer, failures: Failures) -> None:
    what = f"{call.caller}: {call.keys[0]}, told at {answer.at_s:.3f} s"
    if call.deadline_s is not None and answer.at_s > call.deadline_s + failures.late_s:
        verdict.add("late", f"{what}, was to be told by {call.deadline_s:.3f} s")
    if answer.kind == "acknowledged":
        _judge_acknowledged(verdict, places, call, answer, failures.spared)
    elif answer.kind == "unknown":
        _judge_unknown(verdict, call, answer, failures)
    elif failures.undecided and any(one.kind == "unknown" for one in call.answers):
        pass  # what it says of a later sending decides nothing about the first
    elif answer is call.answers[-1] and answer.at_s >= call.sent_s:
        there = {key: places.offsets[key] for key in call.keys if places.offsets.get(key)}
        if there:
            verdict.add("happened", f"{what} {answer.code} ({answer.text}), stands at {there}")


def _judge_acknowledged(
    verdict: Verdict, places: Places, call: Call, answer: Answer, spared: AckLevel
) -> None:
    again = " as a duplicate" if answer.duplicate else ""
    for key, told in zip(call.keys, answer.offsets, strict=True):
        what = f"{call.caller}: {key}, acknowledged{again} at {answer.at_s:.3f} s"
        found = places.offsets.get(key, [])
        if told is None:
            verdict.add("nowhere", f"{what} without its offset, stands at {found}")
        if not found and call.level >= spared:
            verdict.add("lost", f"{what} with offset {told}, is not in the log")
        elif found and told is not None and told not in found:
            verdict.add("moved", f"{what} with offset {told}, stands at {found}")


def _judge_unknown(verdict: Verdict, call: Call, answer: Answer, failures: Failures) -> None:
    what = f"{call.caller}: {call.keys[0]}, told at {answer.at_s:.3f} s {answer.code} ({answer.text})"
    if answer.dot is None:
        verdict.add("nameless", what)
    if failures.undecided:
        return
    if call.deadline_s is None or answer.at_s < call.deadline_s - failures.late_s:
        verdict.add("vague", f"{what}, before its deadline")
    elif failures.decided_s is not None and failures.decided_s < call.deadline_s - 2 * failures.late_s:
        verdict.add("vague", f"{what}, and the log was recovered at {failures.decided_s:.3f} s")


def _judge_asked(verdict: Verdict, places: Places, call: Call) -> None:
    found = [offset for key in call.keys for offset in places.offsets.get(key, [])]
    for asked in call.asked:
        if (asked >= 0) != bool(found) or (found and asked not in found):
            told = "not in the log" if asked < 0 else f"at {asked}"
            verdict.add("outcome", f"{call.caller}: {call.keys[0]}, by its dot {told}, stands at {found}")


def _judge_welcomes(verdict: Verdict, places: Places, welcomes: Iterable[Welcome]) -> None:
    """What one hello has counted the next one counts too, and the log holds."""
    highest: dict[int, Welcome] = {}
    for one in sorted(welcomes, key=lambda welcome: welcome.at_s):
        before = highest.get(one.origin)
        if before is not None and one.watermark < before.watermark:
            verdict.add(
                "counted",
                f"{one.caller}: a hello was told watermark {before.watermark} at {before.at_s:.3f} s, the "
                f"next one {one.watermark} at {one.at_s:.3f} s",
            )
        if before is None or one.watermark >= before.watermark:
            highest[one.origin] = one
    for origin, one in highest.items():
        missing = set(range(1, one.watermark + 1)) - places.counters.get(origin, set())
        if missing:
            verdict.add(
                "counted",
                f"{one.caller}: a hello was told watermark {one.watermark} at {one.at_s:.3f} s, counters "
                f"{sorted(missing)[:5]} are not in the log",
            )


def counted(answers: Answers) -> Counter[str]:
    """Count what callers were told, and how many rows they asked for."""
    counts: Counter[str] = Counter()
    for call in answers.calls:
        counts["rows"] += len(call.keys)
        for answer in call.answers:
            rows = len(call.keys)
            counts[answer.kind] += rows
            counts["duplicate"] += rows * answer.duplicate
        counts["asked"] += len(call.asked)
    counts["welcomes"] += len(answers.welcomes)
    return counts
