"""The model sinks keep the contract of sinks, and report when the service breaks it."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop import Propagator, Settings
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_simulations.chaos.sinks import KINDS, Fact, Facts, ModelSink, SinkFaults
from delta_prop_simulations.chaos.violation import CHECKS, Violation, require
from delta_prop_sinks import check_sink
from delta_prop_sinks.sink import Delivery, RejectDelta, TryAgain
from delta_prop_wire.algebra import VectorState
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import Delta, Source, create, sparse_add
from delta_prop_wire.encode import encode_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop_sinks.sink import Sink

ALL_FAULTS = SinkFaults(before=0.2, after=0.2, half_way=0.2, hang=0.05, slow=0.3, slow_s_max=0.2)

SETTINGS = Settings(apply_timeout_s=2.0, breaker_open_s=1.0)


class Process:
    has_ended = False


class CommitsLate(Random):
    """Random numbers that make a sink commit as late as it may."""

    def random(self) -> float:
        return 0.99


@pytest.mark.parametrize("kind", KINDS)
def test_model_sink_follows_the_contract(kind: Any) -> None:
    model = ModelSink("model", kind, Random(1))

    def make() -> Sink:
        model.kill()
        return model.for_process(Process())

    async def probe(sink: Sink) -> object:
        states = model.states()
        return sorted((ref, states[ref].content) for ref in states)

    run_virtual(check_sink, make, probe)


@pytest.mark.parametrize("kind", KINDS)
def test_each_row_has_one_effect_despite_faults(kind: Any) -> None:
    event_counts: Counter[str] = Counter()
    for seed in range(3):
        event_counts.update(run_failing(kind, seed))
    for what in (
        "failed before the effect",
        "failed after the effect",
        "failed half way",
        "hung",
        "was slow",
    ):
        assert event_counts[f"sink {what}"]
    assert event_counts["sink rejected a delta"] == 3


def run_failing(kind: Any, seed: int) -> Counter[str]:
    model = ModelSink("model", kind, Random(seed), ALL_FAULTS)

    async def main() -> None:
        async with Propagator(SETTINGS, world=virtual_world(seed)) as p:
            await p.attach(model.for_process(Process()))
            for number in range(60):
                poison = {"poison": "model"} if number == 30 else None
                operation = sparse_add([0], [1.0]) if number >= 3 else create([0.0])
                await p.publish(Delta("abc"[number % 3], operation, metadata=poison))
                await anyio.sleep(0.05)
            model.heal()
            await anyio.sleep(20)
            assert [row.offset for row in p.quarantine("model")] == [30, *range(33, 60, 3)]

    run_virtual(main, seed=seed)
    assert not model.violations
    assert sorted(row.offset for row in model.delivered if row.is_new) == [
        number for number in range(60) if number < 30 or number % 3
    ]
    numbers = {ref[1]: state.vector for ref, state in model.states().items()}
    assert {name: float(vector[0]) for name, vector in numbers.items() if vector is not None} == {
        "a": 9.0,
        "b": 19.0,
        "c": 19.0,
    }
    return model.event_counts


def logged_batch(offset: int, keys: str, origin: int = 16, lamport: int | None = None) -> LoggedBatch:
    deltas = [Delta(key, sparse_add([0], [1.0])) for key in keys]
    batch = encode_batch(deltas, origin=origin, base=offset + 1)
    return LoggedBatch(batch, offset, offset + 1 if lamport is None else lamport, Source.LOCAL)


class Context:
    log_id = b"l" * 16
    epoch = 1

    def committed(self, next_offset: int) -> None:
        pass


@pytest.mark.parametrize(
    ("calls", "check"),
    [
        ([(0, "ab"), (2, "a")], None),
        ([(0, "ab"), (0, "ab")], "twice"),
        ([(0, "ab"), (1, "b")], "twice"),
        ([(5, "a"), (6, "b")], None),
    ],
)
def test_sink_reports_rows_delivered_twice(calls: Sequence[tuple[int, str]], check: str | None) -> None:
    model = ModelSink("model", "plain", Random(1))

    async def main() -> None:
        sink = model.for_process(Process())
        context: Any = Context()
        await sink.open(context)
        for offset, keys in calls:
            await sink.apply([Delivery(logged_batch(offset, keys))])

    run_virtual(main)
    assert [violation.check for violation in model.violations[:1]] == ([] if check is None else [check])


def test_sink_reports_reordered_rows_and_concurrent_calls() -> None:
    model = ModelSink("model", "plain", Random(1), SinkFaults(slow=1.0))

    async def main() -> None:
        sink = model.for_process(Process())
        context: Any = Context()
        await sink.open(context)
        await sink.apply([Delivery(logged_batch(5, "a"))])
        await sink.apply([Delivery(logged_batch(3, "a"), redelivered=True)])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sink.apply, [Delivery(logged_batch(6, "a"))])
            tasks.start_soon(sink.apply, [Delivery(logged_batch(7, "b"))])

    run_virtual(main)
    assert [violation.check for violation in model.violations[:2]] == ["order", "order"]
    assert "after offset 5" in model.violations[0].what
    assert "during another call" in model.violations[1].what


def test_killed_sink_has_no_effect_and_loses_uncommitted_rows() -> None:
    model = ModelSink("model", "transactional", CommitsLate())
    process = Process()

    async def main() -> None:
        sink = model.for_process(process)
        context: Any = Context()
        await sink.open(context)
        await sink.apply([Delivery(logged_batch(0, "a"))])
        await sink.aclose()
        await sink.apply([Delivery(logged_batch(1, "b"))])
        process.has_ended = True
        with pytest.raises(TryAgain):
            await sink.apply([Delivery(logged_batch(2, "c"))])
        await sink.aclose()

    run_virtual(main)
    assert set(model.states()) == {("default", "a"), ("default", "b")}
    model.kill()
    assert set(model.states()) == {("default", "a")}


def test_rows_before_rejected_delta_are_applied() -> None:
    model = ModelSink("model", "plain", Random(1))
    deltas = [Delta("a", create([1.0])), Delta("b", create([1.0]), metadata={"poison": "all"})]
    batch = LoggedBatch(encode_batch(deltas, origin=16, base=1), 0, 1, Source.LOCAL)

    async def main() -> None:
        sink = model.for_process(Process())
        context: Any = Context()
        await sink.open(context)
        with pytest.raises(RejectDelta) as caught:
            await sink.apply([Delivery(batch)])
        assert caught.value.offset == 1

    run_virtual(main)
    assert set(model.states()) == {("default", "a")}


def test_state_and_later_deltas_fold_in_canonical_order() -> None:
    facts = Facts()
    facts.begin(VectorState(True, create([1.0]).values, key=(10, 16, 1)), 3)
    duplicate, below, above = (
        Fact.of(logged_batch(*arguments), 0) for arguments in ((3, "a"), (4, "a", 32, 2), (5, "a"))
    )
    assert facts.has(duplicate)
    assert facts.is_before_base(below)
    facts.add(below)
    facts.add(above._replace(key=(11, 16, 6)))
    state = facts.state()
    assert state.vector is not None
    assert (state.vector.tolist(), state.ignored) == ([2.0], 1)


def test_violation_must_name_a_known_check() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        Violation("nonsense", "…")
    with pytest.raises(Violation, match="lost: offset 3"):
        require(False, "lost", "offset 3")
    require(True, "lost", "offset 3")
    assert all(CHECKS.values())
