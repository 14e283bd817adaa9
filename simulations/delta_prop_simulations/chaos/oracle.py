"""The oracle of a chaos run: records each log, checks every step, and checks the results at rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from delta_prop import Propagator
from delta_prop_simulations.chaos import deliveries, log_checks
from delta_prop_simulations.chaos.deliveries import ExpectedRows
from delta_prop_simulations.chaos.histories import READ_BYTES_MAX, ClientHistory, LogHistory
from delta_prop_simulations.chaos.invariants import StepChecker
from delta_prop_simulations.chaos.violation import Violation, require
from delta_prop_sinks import CacheSink, IndexSink
from delta_prop_wire.algebra import VectorState
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.errors import DeltaPropError
from delta_prop_wire.spec import BATCH_ROWS_MAX

if TYPE_CHECKING:
    from delta_prop.api.internals import Internals
    from delta_prop.delivery.feed import Feed
    from delta_prop_simulations.chaos.node import Node
    from delta_prop_simulations.chaos.sinks import ModelSink, Ref
    from delta_prop_simulations.chaos.workload import Reader


class Oracle:
    """The oracle of one run. `check_counts`: the numbers of steps, rows and sinks examined."""

    def __init__(self) -> None:
        self.histories: dict[str, LogHistory] = {}
        self.check_counts: Counter[str] = Counter()
        self.complaints: list[Violation] = []
        """Violations found in code that must not raise them; raised at the next step."""
        self._step_checkers: dict[str, StepChecker] = {}

    def note_start(self, node: str, propagator: Propagator, ending: str | None) -> None:
        """Start the checks of a new process. `ending`: how the previous one ended. Raises Violation."""
        internals = propagator.internals()
        history = self.histories.setdefault(node, LogHistory(node))
        history.start(internals.partition.log, ending)
        self._step_checkers[node] = StepChecker(node, internals, history)

    def note_end(self, node: str) -> None:
        """Stop the checks of a process, which has ended."""
        checker = self._step_checkers.pop(node, None)
        if checker is not None:
            self.check_counts["steps looked at"] += checker.check_count
        history = self.histories.get(node)
        if history is not None:
            history.note_failure()

    def check_step(self, nodes: Iterable[Node]) -> None:
        """Check the current offsets and bounds of all services. Raises Violation."""
        if self.complaints:
            raise self.complaints[0]
        for node in nodes:
            checker = self._step_checkers.get(node.name)
            if checker is not None and node.propagator is not None:
                checker.check(node.service)
                for model in node.models.values():
                    if model.violations:
                        raise model.violations[0]

    async def check_at_rest(
        self, nodes: Sequence[Node], client_history: ClientHistory, readers: Iterable[Reader]
    ) -> None:
        """Check logs, sinks and readers once all work is processed. Raises Violation."""
        histories = []
        for node in nodes:
            assert node.propagator is not None, f"{node.name} is not up"
            history = self.histories[node.name]
            histories.append(history)
            history.note_recovery()  # the rows that the last recovery lost are known only now
            internals = node.propagator.internals()
            self.check_counts["rows of logs"] += check_log(history, internals)
            log_checks.check_causal(history)
            log_checks.check_expected(history)
            log_checks.check_outcomes(history, client_history)
            states = log_checks.fold_canonically((logged, row) for _, logged, row in history.rows())
            log_checks.check_sums(history, client_history, states, f"{node.name}, by its log")
            await self._check_sinks(node, node.propagator, history, states)
        self.check_counts["services with the same deltas"] += log_checks.check_drift(histories)
        for reader in readers:
            self.check_counts["deltas that readers got"] += deliveries.check_reader(
                self.histories[reader.plan.node], reader
            )

    async def _check_sinks(
        self, node: Node, propagator: Propagator, history: LogHistory, full_states: Mapping[Ref, VectorState]
    ) -> None:
        internals = propagator.internals()
        log = internals.partition.log
        is_compacted = bool(log.start_offset) or log.may_have_snapshot()
        unpredictable_vectors = deliveries.find_unpredictable_vectors(history) if is_compacted else set()
        for name in propagator.statistics().sinks:
            feed = internals.sinks.feed(name)
            if feed.has_ended or feed.is_rebuilding:
                self.check_counts[f"sinks that are {feed.state.value}"] += 1
                continue
            who = f"{node.name}, sink {name!r}"
            quarantined = propagator.quarantine(name)
            deliveries.check_quarantine(quarantined, name, who)
            model = node.models.get(name)
            may_have_loaded_states = is_compacted if model is None else model.present.states_below > 0
            expected_rows = ExpectedRows(
                "*" if model is None else model.topics,
                feed.applied,
                _excluded_offsets(feed),
                unpredictable_vectors,
                from_snapshot=may_have_loaded_states,
            )
            deliveries.check_not_overtaken(history, expected_rows, quarantined, who)
            expected_states = deliveries.fold_rows(history, expected_rows, full_states)
            if model is not None:
                self._check_model(history, expected_rows, model)
                deliveries.check_states(expected_states, model.states(), expected_rows, who)
            else:
                await _check_real_sink(expected_states, expected_rows, propagator.sink(name), who)
            self.check_counts["sinks looked at"] += 1

    def _check_model(self, history: LogHistory, expected: ExpectedRows, model: ModelSink) -> None:
        if model.violations:
            raise model.violations[0]
        deliveries.check_delivered(history, model)
        deliveries.check_rows(history, expected, model)
        self.check_counts["rows brought to sinks"] += len(model.delivered)


def check_log(history: LogHistory, internals: Internals) -> int:
    """Check that the log can be read and has the appended rows; return their number. Raises Violation."""
    log, offset, row_count = internals.partition.log, internals.partition.log.start_offset, 0
    who = f"{history.node}: its log"
    require(
        log.high_watermark == log.next_offset,
        "progress",
        f"{who} ends at {log.next_offset}, its high watermark is {log.high_watermark}",
    )
    by_offset = {logged.offset: logged for logged in history.batches}
    require(history.next_offset == log.next_offset, "corruption", f"{who} ends at {log.next_offset}")
    while offset < log.high_watermark:
        try:
            read = log.read(offset, rows_max=BATCH_ROWS_MAX, bytes_max=READ_BYTES_MAX)
        except (DeltaPropError, OSError) as error:
            raise Violation("corruption", f"{who} cannot be read at {offset}: {error}") from error
        require(
            bool(read) and read[-1].next_offset > offset, "corruption", f"{who} returns nothing at {offset}"
        )
        for logged in read:
            appended = by_offset.get(logged.offset)
            if appended is None or _comparable_batch(appended) != _comparable_batch(logged):
                what = (
                    f"{who} holds at {logged.offset} a batch that was never appended: {logged.batch.dot(0)}"
                )
                raise Violation("corruption", what)
            row_count += logged.count
        offset = read[-1].next_offset
    return row_count


async def _check_real_sink(
    expected_states: Mapping[Ref, VectorState], expected_rows: ExpectedRows, sink: object, who: str
) -> None:
    """Check the state that readers of a real index or cache see. Raises Violation."""
    if isinstance(sink, IndexSink):
        states: dict[Ref, VectorState] = {(namespace, key): state for namespace, key, state in sink.rows()}
        deliveries.check_states(expected_states, states, expected_rows, who)
    elif isinstance(sink, CacheSink):
        for ref, state in expected_states.items():
            cached = await sink.get(*ref)
            if (
                cached is not None
                and ref not in expected_rows.unpredictable_vectors
                and cached.content != state.content
            ):
                raise Violation("state", f"{who}: {ref} is {cached}, but the fold of the log is {state}")


def _excluded_offsets(feed: Feed) -> set[int]:
    """Return the offsets that must not have an effect at a sink: quarantined or dropped."""
    return {one.offset for one in feed.quarantine.records()} | set(feed.quarantine.dropped_offsets)


def _comparable_batch(logged: LoggedBatch) -> tuple[object, ...]:
    return (logged.batch.crc, logged.batch.dot(0), logged.lamport, logged.source)
