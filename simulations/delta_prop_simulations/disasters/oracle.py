"""The judge of a run: it keeps what each log held, looks at every step, and judges once all is at rest.

It changes nothing of what it looks at. What is wrong is raised as a Violation.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

from delta_prop_broker.log.durable import DurableLog
from delta_prop_simulations.disasters import deliveries, history
from delta_prop_simulations.disasters.deliveries import Wanted
from delta_prop_simulations.disasters.invariants import Steps
from delta_prop_simulations.disasters.record import READ_BYTES_MAX, Record
from delta_prop_simulations.disasters.violation import Violation, demand
from delta_prop_sinks import CacheSink, IndexSink
from delta_prop_wire.errors import DeltaPropError
from delta_prop_wire.spec import BATCH_ROWS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from delta_prop import Propagator
    from delta_prop.inside import Inside
    from delta_prop.route.feed import Feed
    from delta_prop.server.service import Service
    from delta_prop_simulations.disasters.readers import Reader
    from delta_prop_simulations.disasters.shadow import Shadow
    from delta_prop_simulations.disasters.sinks import ModelSink
    from delta_prop_simulations.disasters.store import Ref
    from delta_prop_wire.algebra import State
    from delta_prop_wire.batch import LoggedBatch


class Node(Protocol):
    """A service as the judge sees it. `propagator`, `service`: None while there is none."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def propagator(self) -> Propagator | None:
        """Of the present life."""
        ...

    @property
    def service(self) -> Service | None:
        """In front of it."""
        ...

    @property
    def models(self) -> Mapping[str, ModelSink]:
        """Its model sinks, by the names under which they are attached."""
        ...


class Judge:
    """Of one run. `struck` counts what the checks have looked at."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.struck: Counter[str] = Counter()
        self.complaints: list[Violation] = []
        """What was seen where nothing may be raised."""
        self._steps: dict[str, Steps] = {}

    def started(self, node: str, propagator: Propagator, before: str | None) -> None:
        """A life begins; `before`: how the one before has ended. Raises Violation."""
        inside = propagator.inside()
        record = self.records.setdefault(node, Record(node))
        record.start(inside.log, before)
        self._steps[node] = Steps(node, inside, record)

    def ended(self, node: str) -> None:
        """A life is over."""
        steps = self._steps.pop(node, None)
        if steps is not None:
            self.struck["steps looked at"] += steps.looked
        record = self.records.get(node)
        if record is not None:
            record.look()

    def each_step(self, nodes: Iterable[Node]) -> None:
        """Bounds and marks, as they are now. Raises Violation."""
        if self.complaints:
            raise self.complaints[0]
        for node in nodes:
            steps = self._steps.get(node.name)
            if steps is not None and node.propagator is not None:
                steps.look(node.service)
                for model in node.models.values():
                    if model.complaints:
                        raise model.complaints[0]

    async def at_rest(self, nodes: Sequence[Node], shadow: Shadow, readers: Iterable[Reader]) -> None:
        """Everything is dealt with: now it must fit. Raises Violation."""
        records = []
        for node in nodes:
            assert node.propagator is not None, f"{node.name} is not up"
            record = self.records[node.name]
            records.append(record)
            record.settle()
            inside = node.propagator.inside()
            self.struck["rows of logs"] += check_log(record, inside)
            history.check_causal(record)
            history.check_expected(record)
            history.check_told(record, shadow)
            states = history.canonical((logged, row) for _, logged, row in record.rows())
            history.check_sums(record, shadow, states, f"{node.name}, by its log")
            await self._check_sinks(node, node.propagator, record, states)
        self.struck["services with the same deltas"] += history.check_drift(records)
        for reader in readers:
            self.struck["deltas that readers got"] += deliveries.check_reader(
                self.records[reader.node], reader
            )

    async def _check_sinks(
        self, node: Node, propagator: Propagator, record: Record, whole: Mapping[Ref, State]
    ) -> None:
        inside = propagator.inside()
        squeezed = bool(inside.log.first_offset) or _may_have_snapshot(inside)
        forgiven = deliveries.forgiven(record) if squeezed else set()
        for name in propagator.statistics().sinks:
            feed = inside.sinks.feed(name)
            if feed.ended or feed.rebuilding:
                self.struck[f"sinks that are {feed.state.value}"] += 1
                continue
            who = f"{node.name}, sink {name!r}"
            held = propagator.quarantine(name)
            deliveries.check_quarantine(held, name, who)
            model = node.models.get(name)
            wanted = Wanted(
                "*" if model is None else model.topics,
                feed.applied,
                _without(feed),
                forgiven,
                from_states=squeezed if model is None else model.present.states_below > 0,
            )
            deliveries.check_held_up(record, wanted, held, who)
            should = deliveries.folded(record, wanted, whole)
            if model is not None:
                self._check_model(record, wanted, model)
                deliveries.check_states(should, model.states(), wanted, who)
            else:
                await _check_real(should, wanted, propagator.sink(name), who)
            self.struck["sinks looked at"] += 1

    def _check_model(self, record: Record, wanted: Wanted, model: ModelSink) -> None:
        if model.complaints:
            raise model.complaints[0]
        deliveries.check_brought(record, model)
        deliveries.check_rows(record, wanted, model)
        self.struck["rows brought to sinks"] += len(model.brought)


def check_log(record: Record, inside: Inside) -> int:
    """The log reads whole, and says what was appended. How many rows it has."""
    log, at, rows = inside.log, inside.log.first_offset, 0
    who = f"{record.node}: its log"
    demand(
        log.visible == log.next_offset, "progress", f"{who} ends at {log.next_offset}, shows {log.visible}"
    )
    by_offset = {logged.offset: logged for logged in record.batches}
    demand(record.next_offset == log.next_offset, "damage", f"{who} ends at {log.next_offset}")
    while at < log.visible:
        try:
            found = log.read(at, rows_max=BATCH_ROWS_MAX, bytes_max=READ_BYTES_MAX)
        except (DeltaPropError, OSError) as error:
            raise Violation("damage", f"{who} cannot be read at {at}: {error}") from error
        demand(bool(found) and found[-1].next_offset > at, "damage", f"{who} gives nothing at {at}")
        for logged in found:
            same = by_offset.get(logged.offset)
            if same is None or _said(same) != _said(logged):
                what = f"{who} says at {logged.offset} what was never appended there: {logged.batch.dot(0)}"
                raise Violation("damage", what)
            rows += logged.count
        at = found[-1].next_offset
    return rows


async def _check_real(should: Mapping[Ref, State], wanted: Wanted, sink: object, who: str) -> None:
    """A sink of ours, by what its readers see."""
    if isinstance(sink, IndexSink):
        rows: dict[Ref, State] = {(space, key): state for space, key, state in sink.rows()}
        deliveries.check_states(should, rows, wanted, who)
    elif isinstance(sink, CacheSink):
        for ref, state in should.items():
            found = await sink.get(*ref)
            if found is not None and ref not in wanted.forgiven and found.content != state.content:
                raise Violation("state", f"{who}: {ref} is {found}, and the fold of the log {state}")


def _without(feed: Feed) -> set[int]:
    """Offsets that must not have an effect at a sink: set aside, or dropped."""
    return {one.offset for one in feed.quarantine.records()} | set(feed.quarantine.given_up)


def _said(logged: LoggedBatch) -> tuple[object, ...]:
    return (logged.batch.crc, logged.batch.dot(0), logged.lamport, logged.source)


def _may_have_snapshot(inside: Inside) -> bool:
    return isinstance(inside.log, DurableLog) and inside.log.may_have_snapshot()
