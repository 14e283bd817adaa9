"""Records every answer that callers got, and compares each with the log after its recovery.

A row is identified by its key, which no other row has, so the check trusts neither dots nor offsets. Pure
but for `read_log_index`, which reads a log frame by frame from its files and neither opens nor recovers it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks._crash_check import Verdict
from delta_prop.calls.outcomes import PublishAck
from delta_prop_broker.corruption import LogCorrupted
from delta_prop_broker.disk import Disk
from delta_prop_broker.readonly.inspect import inspect
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import DeltaPropError, Refused
from delta_prop_wire.spec import ErrorCode

NOT_IN_LOG = -1
"""Answer to an outcome query: the log does not have the dot."""
KINDS = {
    "lost": "acknowledged, but not in the log",
    "other offset": "acknowledged at a different offset than it has in the log",
    "no offset": "acknowledged without an offset",
    "stored twice": "more than once in the log",
    "refused, but stored": "refused as if it had no effect, but in the log",
    "needlessly unknown": "answered OUTCOME_UNKNOWN, while there was time for the exact answer",
    "unknown without dot": "answered OUTCOME_UNKNOWN, without the dot for an outcome query",
    "wrong query answer": "an outcome query by the dot was answered wrongly",
    "wrong watermark": "a hello got a watermark below an earlier one, or above a row that is not in the log",
    "late answer": "answered after its deadline",
    "unanswered": "never answered",
    "corrupt": "the log is corrupted",
    "stuck": "the service did not start or end, or a caller did not end",
}
"""Kinds of violations: the name under which each is counted, and its description."""


@dataclass(slots=True)
class Answer:
    """One answer to one call. `kind`: acknowledged, refused (it had no effect) or unknown (OUTCOME_UNKNOWN).

    `offsets` of an acknowledgement: one per row, None if it named none. `dot`: of an unknown outcome.
    """

    kind: str
    at_s: float
    offsets: list[int | None] = field(default_factory=list)
    duplicate: bool = False
    code: str = ""
    text: str = ""
    dot: tuple[int, int] | None = None


@dataclass(slots=True)
class Call:
    """Rows that are accepted or refused together, the time they were sent, and every answer to them.

    `level`: the level that an acknowledgement promises. `sent_s`: the last time they were sent; a refusal
    before that does not concern later attempts. `queried_offsets`: the answers to later outcome queries by
    the dot: an offset or NOT_IN_LOG. `is_excused`: no answer is due, as the connection broke
    and the caller does not send twice.
    """

    caller: str
    keys: list[str]
    level: int
    sent_s: float
    deadline_s: float | None = None
    answers: list[Answer] = field(default_factory=list)
    queried_offsets: list[int] = field(default_factory=list)
    is_excused: bool = False


@dataclass(slots=True)
class Welcome:
    """The watermark in the answer to a hello."""

    caller: str
    origin: int
    watermark: int
    at_s: float


class Answers:
    """The calls of one run with their answers, and the welcomes. `now` returns the time in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.calls: list[Call] = []
        self.welcomes: list[Welcome] = []
        self._now = now

    def call(self, caller: str, keys: Sequence[str], level: AckLevel, timeout_s: float | None = None) -> Call:
        """Record that rows are sent for the first time."""
        now = self._now()
        deadline = None if timeout_s is None else now + timeout_s
        call = Call(caller, list(keys), int(level), now, deadline)
        self.calls.append(call)
        return call

    def note_resent(self, call: Call) -> None:
        """Record that the caller sends the call again, whatever the earlier answers were."""
        call.sent_s = self._now()

    def note_published(self, call: Call, ack: PublishAck) -> None:
        """Record an acknowledgement as the library returns it."""
        offsets: list[int | None] = []
        next_new = ack.offset
        for row in range(ack.count):
            if row in ack.duplicates:
                offsets.append(ack.duplicates[row])
            else:
                offsets.append(next_new)
                next_new = None if next_new is None else next_new + 1
        self.note_acknowledged(call, offsets, duplicate=bool(ack.duplicates))

    def note_acknowledged(self, call: Call, offsets: Sequence[int | None], *, duplicate: bool) -> None:
        """Record an acknowledgement, row by row."""
        call.answers.append(Answer("acknowledged", self._now(), list(offsets), duplicate))

    def note_refused(self, call: Call, refusal: DeltaPropError) -> None:
        """Record a refusal: the call had no effect or, if the code is OUTCOME_UNKNOWN, may have had one."""
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

    def note_welcome(self, caller: str, origin: int, watermark: int) -> None:
        """Record the watermark in the answer to a hello."""
        self.welcomes.append(Welcome(caller, origin, watermark, self._now()))

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return {"calls": list(map(asdict, self.calls)), "welcomes": list(map(asdict, self.welcomes))}

    def merge(self, data: Mapping[str, Any]) -> None:
        """Add the record of another process."""
        for call in data["calls"]:
            answers = [Answer(**answer) for answer in call["answers"]]
            for answer in answers:
                answer.dot = None if answer.dot is None else (answer.dot[0], answer.dot[1])
            self.calls.append(Call(**{**call, "answers": answers}))
        self.welcomes += [Welcome(**welcome) for welcome in data["welcomes"]]


@dataclass(slots=True)
class LogIndex:
    """The content of a log's files: the offsets of each key, and the counters of each origin."""

    offsets: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    counters: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    corruption: list[str] = field(default_factory=list)
    rows: int = 0


def read_log_index(disk: Disk) -> LogIndex:
    """Read every row from the files of a data directory that no process writes to."""
    index = LogIndex()
    for entry in inspect(disk):
        if isinstance(entry, LogCorrupted):
            index.corruption.append(str(entry))
            continue
        logged = entry.logged
        batch = logged.batch
        for row in range(batch.count):
            index.counters[batch.origin].add(batch.counter(row))
            if not batch.is_control:
                index.offsets[batch.keys[row]].append(logged.offset + row)
                index.rows += 1
    return index


@dataclass(frozen=True, slots=True)
class Failures:
    """The failures of the disk during a run.

    `surviving_level`: the lowest level whose acknowledgements survive them. `recovered_s`: the time of the
    log's last recovery; if it is None, no answer is judged by it. `has_no_recovery`: the log was closed, or
    stopped for good, before it recovered. `grace_s`: how long after its deadline an answer may come, as the
    service finishes work in progress, on a machine that may be busy.
    """

    surviving_level: AckLevel = AckLevel.LOGGED
    recovered_s: float | None = None
    has_no_recovery: bool = False
    grace_s: float = 0.5


def judge(index: LogIndex, answers: Answers, failures: Failures) -> Verdict:
    """Compare every answer with the recovered log."""
    verdict = Verdict()
    for text in index.corruption:
        verdict.add("corrupt", text)
    for call in answers.calls:
        for key in call.keys:
            if len(index.offsets.get(key, ())) > 1:
                verdict.add("stored twice", f"{call.caller}: {key} is at {index.offsets[key]}")
        for answer in call.answers:
            _judge_answer(verdict, index, call, answer, failures)
        if not call.answers and not call.is_excused:
            verdict.add("unanswered", f"{call.caller}: {call.keys[0]}, sent at {call.sent_s:.3f} s")
        _judge_queried(verdict, index, call)
    _judge_welcomes(verdict, index, answers.welcomes)
    return verdict


def _judge_answer(verdict: Verdict, index: LogIndex, call: Call, answer: Answer, failures: Failures) -> None:
    subject = f"{call.caller}: {call.keys[0]}, answered at {answer.at_s:.3f} s"
    if call.deadline_s is not None and answer.at_s > call.deadline_s + failures.grace_s:
        verdict.add("late answer", f"{subject}, was due by {call.deadline_s:.3f} s")
    if answer.kind == "acknowledged":
        _judge_acknowledged(verdict, index, call, answer, failures.surviving_level)
    elif answer.kind == "unknown":
        _judge_unknown(verdict, call, answer, failures)
    elif failures.has_no_recovery and any(earlier.kind == "unknown" for earlier in call.answers):
        pass  # a refusal of a later send decides nothing about the first one
    elif answer is call.answers[-1] and answer.at_s >= call.sent_s:
        found_at = {key: index.offsets[key] for key in call.keys if index.offsets.get(key)}
        if found_at:
            verdict.add("refused, but stored", f"{subject} {answer.code} ({answer.text}), is at {found_at}")


def _judge_acknowledged(
    verdict: Verdict, index: LogIndex, call: Call, answer: Answer, surviving_level: AckLevel
) -> None:
    manner = " as a duplicate" if answer.duplicate else ""
    for key, acked in zip(call.keys, answer.offsets, strict=True):
        subject = f"{call.caller}: {key}, acknowledged{manner} at {answer.at_s:.3f} s"
        logged = index.offsets.get(key, [])
        if acked is None:
            verdict.add("no offset", f"{subject} without its offset, is at {logged}")
        if not logged and call.level >= surviving_level:
            verdict.add("lost", f"{subject} with offset {acked}, is not in the log")
        elif logged and acked is not None and acked not in logged:
            verdict.add("other offset", f"{subject} with offset {acked}, is at {logged}")


def _judge_unknown(verdict: Verdict, call: Call, answer: Answer, failures: Failures) -> None:
    subject = f"{call.caller}: {call.keys[0]}, answered at {answer.at_s:.3f} s {answer.code} ({answer.text})"
    if answer.dot is None:
        verdict.add("unknown without dot", subject)
    if failures.has_no_recovery:
        return
    if call.deadline_s is None or answer.at_s < call.deadline_s - failures.grace_s:
        verdict.add("needlessly unknown", f"{subject}, before its deadline")
    elif failures.recovered_s is not None and failures.recovered_s < call.deadline_s - 2 * failures.grace_s:
        verdict.add(
            "needlessly unknown", f"{subject}, and the log was recovered at {failures.recovered_s:.3f} s"
        )


def _judge_queried(verdict: Verdict, index: LogIndex, call: Call) -> None:
    logged = [offset for key in call.keys for offset in index.offsets.get(key, [])]
    for queried in call.queried_offsets:
        if (queried != NOT_IN_LOG) != bool(logged) or (logged and queried not in logged):
            claim = "not in the log" if queried == NOT_IN_LOG else f"at {queried}"
            subject = f"{call.caller}: {call.keys[0]}"
            verdict.add("wrong query answer", f"{subject}, by its dot {claim}, is at {logged}")


def _judge_welcomes(verdict: Verdict, index: LogIndex, welcomes: Iterable[Welcome]) -> None:
    """Check that no hello got a watermark below an earlier one, and that the log has all rows up to each."""
    highest: dict[int, Welcome] = {}
    for one in sorted(welcomes, key=lambda welcome: welcome.at_s):
        before = highest.get(one.origin)
        if before is not None and one.watermark < before.watermark:
            verdict.add(
                "wrong watermark",
                f"{one.caller}: a hello got watermark {before.watermark} at {before.at_s:.3f} s, the "
                f"next one {one.watermark} at {one.at_s:.3f} s",
            )
        if before is None or one.watermark >= before.watermark:
            highest[one.origin] = one
    for origin, one in highest.items():
        missing = set(range(1, one.watermark + 1)) - index.counters.get(origin, set())
        if missing:
            verdict.add(
                "wrong watermark",
                f"{one.caller}: a hello got watermark {one.watermark} at {one.at_s:.3f} s, but counters "
                f"{sorted(missing)[:5]} are not in the log",
            )


def count_answers(answers: Answers) -> Counter[str]:
    """Count the rows sent, and the rows answered by kind of answer; also outcome queries and welcomes."""
    counts: Counter[str] = Counter()
    for call in answers.calls:
        counts["rows"] += len(call.keys)
        for answer in call.answers:
            rows = len(call.keys)
            counts[answer.kind] += rows
            counts["duplicate"] += rows * answer.duplicate
        counts["queried"] += len(call.queried_offsets)
    counts["welcomes"] += len(answers.welcomes)
    return counts
