"""The oracle of a run: records what each log held, checks every step, and checks the results at rest.

It changes nothing that it examines. It raises what it finds as a Violation.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

from delta_prop_broker.log.durable import DurableLog
from delta_prop_simulations.chaos import deliveries, log_checks
from delta_prop_simulations.chaos.deliveries import ExpectedRows
from delta_prop_simulations.chaos.invariants import StepChecker
from delta_prop_simulations.chaos.log_history import READ_BYTES_MAX, LogHistory
from delta_prop_simulations.chaos.violation import Violation, require
from delta_prop_sinks import CacheSink, IndexSink
from delta_prop_wire.errors import DeltaPropError
from delta_prop_wire.spec import BATCH_ROWS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from delta_prop import Propagator
    from delta_prop.internals import Internals
    from delta_prop.route.feed import Feed
    from delta_prop.server.service import Service
    from delta_prop_simulations.chaos.client_history import ClientHistory
    from delta_prop_simulations.chaos.readers import Reader
    from delta_prop_simulations.chaos.sinks import ModelSink
    from delta_prop_simulations.chaos.store import Ref
    from delta_prop_wire.algebra import VectorState
    from delta_prop_wire.batch import LoggedBatch


class Node(Protocol):
    """A service as the oracle sees it. `propagator`, `service`: None while there is none."""

    @property
    def name(self) -> str:
        """The service's name."""
        ...

    @property
    def propagator(self) -> Propagator | None:
        """The propagator of the current life."""
        ...

    @property
    def service(self) -> Service | None:
        """The server in front of it."""
        ...

    @property
    def models(self) -> Mapping[str, ModelSink]:
        """The attached model sinks, by name."""
        ...


class Oracle:
    """The oracle of one run. `struck` counts what the checks have examined."""

    def __init__(self) -> None:
        self.histories: dict[str, LogHistory] = {}
        self.struck: Counter[str] = Counter()
        self.complaints: list[Violation] = []
        """Violations found where nothing may be raised."""
        self._steps: dict[str, StepChecker] = {}

    def note_start(self, node: str, propagator: Propagator, before: str | None) -> None:
        """Begin a life; `before`: the ending of the previous one. Raises Violation."""
        inside = propagator.internals()
        record = self.histories.setdefault(node, LogHistory(node))
        record.start(inside.log, before)
        self._steps[node] = StepChecker(node, inside, record)

    def note_end(self, node: str) -> None:
        """End a life."""
        steps = self._steps.pop(node, None)
        if steps is not None:
            self.struck["steps looked at"] += steps.checks
        record = self.histories.get(node)
        if record is not None:
            record.note_failure()

    def check_step(self, nodes: Iterable[Node]) -> None:
        """Check bounds and offsets as they are now. Raises Violation."""
        if self.complaints:
            raise self.complaints[0]
        for node in nodes:
            steps = self._steps.get(node.name)
            if steps is not None and node.propagator is not None:
                steps.check(node.service)
                for model in node.models.values():
                    if model.violations:
                        raise model.violations[0]

    async def check_at_rest(
        self, nodes: Sequence[Node], client_history: ClientHistory, readers: Iterable[Reader]
    ) -> None:
        """Check logs, sinks and readers after all work is processed. Raises Violation."""
        records = []
        for node in nodes:
            assert node.propagator is not None, f"{node.name} is not up"
            record = self.histories[node.name]
            records.append(record)
            record.note_recovery()
            inside = node.propagator.internals()
            self.struck["rows of logs"] += check_log(record, inside)
            log_checks.check_causal(record)
            log_checks.check_expected(record)
            log_checks.check_outcomes(record, client_history)
            states = log_checks.fold_canonically((logged, row) for _, logged, row in record.rows())
            log_checks.check_sums(record, client_history, states, f"{node.name}, by its log")
            await self._check_sinks(node, node.propagator, record, states)
        self.struck["services with the same deltas"] += log_checks.check_drift(records)
        for reader in readers:
            self.struck["deltas that readers got"] += deliveries.check_reader(
                self.histories[reader.node], reader
            )

    async def _check_sinks(
        self, node: Node, propagator: Propagator, history: LogHistory, full_states: Mapping[Ref, VectorState]
    ) -> None:
        inside = propagator.internals()
        squeezed = bool(inside.log.start_offset) or _can_have_snapshot(inside)
        forgiven = deliveries.excused_vectors(history) if squeezed else set()
        for name in propagator.statistics().sinks:
            feed = inside.sinks.feed(name)
            if feed.has_ended or feed.is_rebuilding:
                self.struck[f"sinks that are {feed.state.value}"] += 1
                continue
            who = f"{node.name}, sink {name!r}"
            held = propagator.quarantine(name)
            deliveries.check_quarantine(held, name, who)
            model = node.models.get(name)
            wanted = ExpectedRows(
                "*" if model is None else model.topics,
                feed.applied,
                _excluded_offsets(feed),
                forgiven,
                from_states=squeezed if model is None else model.present.states_below > 0,
            )
            deliveries.check_not_overtaken(history, wanted, held, who)
            should = deliveries.fold_rows(history, wanted, full_states)
            if model is not None:
                self._check_model(history, wanted, model)
                deliveries.check_states(should, model.states(), wanted, who)
            else:
                await _check_real(should, wanted, propagator.sink(name), who)
            self.struck["sinks looked at"] += 1

    def _check_model(self, history: LogHistory, expected: ExpectedRows, model: ModelSink) -> None:
        if model.violations:
            raise model.violations[0]
        deliveries.check_delivered(history, model)
        deliveries.check_rows(history, expected, model)
        self.struck["rows brought to sinks"] += len(model.delivered)


def check_log(history: LogHistory, internals: Internals) -> int:
    """Check that the log is readable and holds what was appended; returns its number of rows."""
    log, at, rows = internals.log, internals.log.start_offset, 0
    who = f"{history.node}: its log"
    require(
        log.high_watermark == log.next_offset,
        "progress",
        f"{who} ends at {log.next_offset}, its high watermark is {log.high_watermark}",
    )
    by_offset = {logged.offset: logged for logged in history.batches}
    require(history.next_offset == log.next_offset, "corruption", f"{who} ends at {log.next_offset}")
    while at < log.high_watermark:
        try:
            found = log.read(at, rows_max=BATCH_ROWS_MAX, bytes_max=READ_BYTES_MAX)
        except (DeltaPropError, OSError) as error:
            raise Violation("corruption", f"{who} cannot be read at {at}: {error}") from error
        require(bool(found) and found[-1].next_offset > at, "corruption", f"{who} returns nothing at {at}")
        for logged in found:
            same = by_offset.get(logged.offset)
            if same is None or _comparable_row(same) != _comparable_row(logged):
                what = (
                    f"{who} holds at {logged.offset} a batch that was never appended: {logged.batch.dot(0)}"
                )
                raise Violation("corruption", what)
            rows += logged.count
        at = found[-1].next_offset
    return rows


async def _check_real(
    should: Mapping[Ref, VectorState], expected: ExpectedRows, sink: object, who: str
) -> None:
    """Check one of the package's own sinks by what its readers see."""
    if isinstance(sink, IndexSink):
        rows: dict[Ref, VectorState] = {(space, key): state for space, key, state in sink.rows()}
        deliveries.check_states(should, rows, expected, who)
    elif isinstance(sink, CacheSink):
        for ref, state in should.items():
            found = await sink.get(*ref)
            if found is not None and ref not in expected.excused and found.content != state.content:
                raise Violation("state", f"{who}: {ref} is {found}, the fold of the log is {state}")


def _excluded_offsets(feed: Feed) -> set[int]:
    """Return the offsets that must not have an effect at a sink: quarantined or dropped."""
    return {one.offset for one in feed.quarantine.records()} | set(feed.quarantine.dropped_offsets)


def _comparable_row(logged: LoggedBatch) -> tuple[object, ...]:
    return (logged.batch.crc, logged.batch.dot(0), logged.lamport, logged.source)


def _can_have_snapshot(internals: Internals) -> bool:
    return isinstance(internals.log, DurableLog) and internals.log.may_have_snapshot()
