"""The check behind `bench crash --disk-faults` passes correct answers and finds each kind of wrong answer."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchmarks._crash_answers import (
    KINDS,
    NOT_IN_LOG,
    Answers,
    Failures,
    LogIndex,
    count_answers,
    judge,
    read_log_index,
)
from delta_prop.calls.outcomes import PublishAck
from delta_prop_broker.local_disk import LocalDisk
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.log.settings import LogSettings
from delta_prop_wire.delta import AckLevel, Delta, Dot, Source, opaque
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode
from tests.broker.durable import Clock, FixedRandomness

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks._crash_check import Verdict

ORIGIN, OTHER = 77, 78
DURABLE = AckLevel.DURABLE
TIMEOUT_S = 60.0
DOT = Dot(ORIGIN, 9)


class Scene:
    """A log of ten rows, and callers that got correct answers, each of a different kind."""

    def __init__(self) -> None:
        self.now = 0.0
        self.answers = Answers(lambda: self.now)
        self.log_index = LogIndex(rows=10)
        for offset in range(10):
            self.log_index.offsets[f"k{offset}"].append(offset)
            self.log_index.counters[ORIGIN].add(offset + 1)
        call = self.answers.call
        self.answers.note_published(call("publish", ["k0", "k1"], DURABLE, TIMEOUT_S), publish_ack(0, 2))
        self.answers.note_published(call("publish-ids", ["k2"], DURABLE), publish_ack(None, 1, {0: 2}))
        self.answers.note_acknowledged(call("bare", ["k3", "k4"], DURABLE), [3, 4], duplicate=True)
        self.answers.note_refused(call("refused", ["gone"], DURABLE, TIMEOUT_S), log_failed())
        self.resent = call("resends", ["k5"], DURABLE)
        self.answers.note_refused(self.resent, log_failed())
        self.now = 1.0
        self.answers.note_resent(self.resent)
        self.answers.note_acknowledged(self.resent, [5], duplicate=True)
        self.uncertain = call("uncertain", ["k6"], DURABLE, 0.01)
        self.answers.note_refused(self.uncertain, outcome_unknown())
        self.uncertain.queried_offsets.append(6)
        call("broken", ["nobody knows"], DURABLE).is_excused = True
        for at_s, watermark in ((0.0, 0), (1.0, 7), (2.0, 10)):
            self.now = at_s
            self.answers.note_welcome("bare", ORIGIN, watermark)

    def verdict(self, failures: Failures | None = None) -> Verdict:
        return judge(self.log_index, self.answers, failures or Failures())


def publish_ack(
    offset: int | None, count: int, duplicates: dict[int, int | None] | None = None
) -> PublishAck:
    return PublishAck(offset, DOT, count, DURABLE, duplicates or {})


def log_failed() -> Refused:
    return Refused(ErrorCode.LOG_FAILED, "it was recovered without it", retry_after_ms=1000)


def outcome_unknown(dot: Dot | None = DOT) -> Refused:
    details = {} if dot is None else {"dot": dot}
    return Refused(ErrorCode.OUTCOME_UNKNOWN, "it may have happened", details=details)


def test_correct_answers_pass() -> None:
    scene = Scene()
    assert scene.verdict().examples == []
    counts = count_answers(scene.answers)
    assert (counts["acknowledged"], counts["duplicate"], counts["refused"]) == (6, 4, 2)
    assert (counts["unknown"], counts["queried"], counts["welcomes"]) == (1, 1, 3)


def lose_delta(scene: Scene) -> None:
    del scene.log_index.offsets["k1"]


def move_delta(scene: Scene) -> None:
    scene.log_index.offsets["k4"] = [40]


def acknowledge_without_offset(scene: Scene) -> None:
    scene.answers.note_acknowledged(scene.answers.call("other", ["k8"], DURABLE), [None], duplicate=True)


def store_delta_twice(scene: Scene) -> None:
    scene.log_index.offsets["k0"].append(11)


def store_refused_delta(scene: Scene) -> None:
    scene.log_index.offsets["gone"].append(10)


def refuse_stored_delta(scene: Scene) -> None:
    scene.answers.note_refused(scene.resent, log_failed())


def report_closed_for_stored_delta(scene: Scene) -> None:
    scene.answers.note_refused(scene.answers.call("other", ["k8"], DURABLE), UsageError("it is closed"))


def report_unknown_before_deadline(scene: Scene) -> None:
    scene.answers.note_refused(scene.answers.call("other", ["k8"], DURABLE, TIMEOUT_S), outcome_unknown())


def report_unknown_without_deadline(scene: Scene) -> None:
    scene.answers.note_refused(scene.answers.call("other", ["k8"], DURABLE), outcome_unknown())


def report_unknown_without_dot(scene: Scene) -> None:
    scene.answers.note_refused(scene.answers.call("other", ["k8"], DURABLE, 0.0), outcome_unknown(None))


def deny_stored_dot(scene: Scene) -> None:
    scene.uncertain.queried_offsets.append(NOT_IN_LOG)


def report_wrong_offset(scene: Scene) -> None:
    scene.uncertain.queried_offsets.append(7)


def lower_watermark(scene: Scene) -> None:
    scene.now = 3.0
    scene.answers.note_welcome("bare", ORIGIN, 9)


def count_missing_delta(scene: Scene) -> None:
    scene.answers.note_welcome("bare", OTHER, 1)


def answer_late(scene: Scene) -> None:
    call = scene.answers.call("other", ["k8"], DURABLE, 1.0)
    scene.now += 2.0
    scene.answers.note_published(call, publish_ack(8, 1))


def leave_unanswered(scene: Scene) -> None:
    scene.answers.call("other", ["k8"], DURABLE)


def report_corruption(scene: Scene) -> None:
    scene.log_index.corruption.append("a frame is torn")


@pytest.mark.parametrize(
    ("plant_fault", "kind"),
    [
        (lose_delta, "lost"),
        (move_delta, "other offset"),
        (acknowledge_without_offset, "no offset"),
        (store_delta_twice, "stored twice"),
        (store_refused_delta, "refused, but stored"),
        (refuse_stored_delta, "refused, but stored"),
        (report_closed_for_stored_delta, "refused, but stored"),
        (report_unknown_before_deadline, "needlessly unknown"),
        (report_unknown_without_deadline, "needlessly unknown"),
        (report_unknown_without_dot, "unknown without dot"),
        (deny_stored_dot, "wrong query answer"),
        (report_wrong_offset, "wrong query answer"),
        (lower_watermark, "wrong watermark"),
        (count_missing_delta, "wrong watermark"),
        (answer_late, "late answer"),
        (leave_unanswered, "unanswered"),
        (report_corruption, "corrupt"),
    ],
)
def test_each_wrong_answer_is_found_and_named(plant_fault: Callable[[Scene], None], kind: str) -> None:
    scene = Scene()
    plant_fault(scene)
    assert scene.verdict().counts == {kind: 1}
    assert kind in KINDS


def test_unknown_outcome_at_deadline_is_wrong_if_log_had_recovered_well_before() -> None:
    scene = Scene()
    call = scene.answers.call("other", ["k8"], DURABLE, 10.0)
    scene.now += 10.0
    scene.answers.note_refused(call, outcome_unknown())
    deadline = call.deadline_s
    assert deadline is not None
    assert scene.verdict(Failures(recovered_s=deadline - 0.5)).examples == []
    assert scene.verdict(Failures(recovered_s=deadline - 5.0)).counts == {"needlessly unknown": 1}


def test_unknown_outcome_is_allowed_if_log_closed_before_its_recovery() -> None:
    scene = Scene()
    call = scene.answers.call("other", ["k8"], DURABLE, TIMEOUT_S)
    scene.answers.note_refused(call, outcome_unknown())
    scene.answers.note_refused(call, log_failed())  # resending decides nothing about the first call
    assert scene.verdict(Failures(has_no_recovery=True)).examples == []


def test_delta_below_surviving_level_may_be_lost() -> None:
    scene = Scene()
    call = scene.answers.call("logged", ["lost"], AckLevel.LOGGED)
    scene.answers.note_published(call, publish_ack(10, 1))
    assert scene.verdict(Failures(surviving_level=AckLevel.DURABLE)).examples == []
    assert scene.verdict().counts == {"lost": 1}


def test_answers_round_trip_through_json() -> None:
    scene, other = Scene(), Answers(lambda: 0.0)
    other.merge(json.loads(json.dumps(scene.answers.to_json())))
    assert (other.calls, other.welcomes) == (scene.answers.calls, scene.answers.welcomes)


def test_log_index_is_read_from_log_files(tmp_path: Path) -> None:
    log, _ = DurableLog.open(
        LocalDisk(tmp_path), settings=LogSettings(), randomness=FixedRandomness(), clock=Clock()
    )
    for base in (1, 3):
        deltas = [Delta(f"k{base + row}", opaque(b"x")) for row in range(2)]
        log.append(encode_batch(deltas, origin=ORIGIN, base=base), lamport=base, source=Source.LOCAL)
    log.close()
    log_index = read_log_index(LocalDisk(tmp_path))
    assert dict(log_index.offsets) == {"k1": [0], "k2": [1], "k3": [2], "k4": [3]}
    assert (log_index.counters[ORIGIN], log_index.rows, log_index.corruption) == ({1, 2, 3, 4}, 4, [])
    path = next(tmp_path.glob("streams/default/0/*.log"))
    raw = bytearray(path.read_bytes())
    raw[100] ^= 1
    path.write_bytes(raw)
    corrupted = replace(read_log_index(LocalDisk(tmp_path)), rows=0)
    assert len(corrupted.corruption) == 1
