"""Everything that one run will do, as plain data: drawn from a seed, written as JSON, made smaller by hand.

A run draws within its parts from the same seed, by their names; so a plan with a part taken out does the rest
as before.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

Knobs = dict[str, float | int | str | bool]

STRIKES = {
    "kill": "a service's process is killed, and started again after a time",
    "power": "a machine loses its power, and what its disk had not synced; it is started again",
    "last call": "a call of the disk is the last one of the process or of the machine",
    "write error": "writes fail for a while",
    "sync error": "a sync fails",
    "read error": "reads fail for a while",
    "disk full": "the disk has no room for a while",
    "slow disk": "calls on threads take long for a while",
    "cut": "nothing gets through from one host to another for a while",
    "cut both": "nothing gets through between two hosts for a while",
    "reset": "all connections of a host break",
    "slow link": "a way between two hosts is slow for a while",
    "stop": "a service is stopped as it should be, and started again",
    "pause": "a sink is paused for a while",
    "detach": "a sink is detached for a while",
    "rebuild": "a sink is rebuilt",
    "kill writer": "a producer's process is killed, and started again",
    "kill reader": "a subscriber's process is killed, and started again",
    "stall reader": "a subscriber does not read for a while",
}
"""What can be struck with, and what that is."""


@dataclass(frozen=True, slots=True)
class SinkPlan:
    """A sink of a service. `kind`: a model sink's, or `cache` or `index`, which are real ones."""

    name: str
    kind: str
    topics: str = "*"
    required: bool = True
    pacing: bool = False
    faults: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodePlan:
    """A service on its machine. `log`, `settings`, `server`: fields of LogSettings, Settings and
    ServerSettings; `log` None: in memory.
    `threads`, `jumps`, `drift`: of its threads and its clock. `forward_to`: names of other nodes.
    """

    name: str
    log: Knobs | None
    settings: Knobs
    sinks: tuple[SinkPlan, ...]
    forward_to: tuple[str, ...] = ()
    threads: dict[str, float] = field(default_factory=dict)
    drift: float = 0.0
    jumps: tuple[tuple[float, float], ...] = ()
    server: Knobs = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WriterPlan:
    """A producer. `embedded`: it lives in the node's process, else in one of its own. `burst`: deltas at
    once, `gap_s`: the mean time between. `level`: what it asks for; None: the default. `poison`: the share of
    what sinks reject. `patience_s`: how long it waits for an acknowledgement. `offers`: an embedded one
    without numbers of its own looks at its receipts, and does not wait. `hot`: it changes two vectors alone.
    """

    name: str
    node: str
    embedded: bool
    deltas: int
    burst: int
    gap_s: float
    level: str | None = None
    poison: float = 0.0
    patience_s: float = 20.0
    offers: bool = False
    hot: bool = False


@dataclass(frozen=True, slots=True)
class ReaderPlan:
    """A subscriber in a process of its own. `batches`: whether it takes whole ones. `credit`: deltas that may
    lie there unread.
    """

    name: str
    node: str
    topics: str = "*"
    group: bool = False
    batches: bool = True
    credit: int = 20_000


@dataclass(frozen=True, slots=True)
class StrikePlan:
    """What strikes, when, whom (a host, or `node/sink`, or `host>host`), for how long, and how hard."""

    at_s: float
    kind: str
    on: str
    for_s: float = 0.0
    amount: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. `network`: fields of Conditions. `power_cut_at_end`: whether, once all is well and looked at,
    the machines lose their power and are looked at again.
    """

    seed: int
    nodes: tuple[NodePlan, ...]
    writers: tuple[WriterPlan, ...]
    readers: tuple[ReaderPlan, ...] = ()
    strikes: tuple[StrikePlan, ...] = ()
    network: dict[str, float | None] = field(default_factory=dict)
    duration_s: float = 30.0
    power_cut_at_end: bool = True

    def to_json(self) -> str:
        """As a text that `from_json` reads."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan. Raises UsageError."""
        try:
            told = json.loads(text)
            nodes = tuple(_node(one) for one in told.pop("nodes"))
            writers = tuple(WriterPlan(**one) for one in told.pop("writers"))
            readers = tuple(ReaderPlan(**one) for one in told.pop("readers"))
            strikes = tuple(StrikePlan(**one) for one in told.pop("strikes"))
            return cls(nodes=nodes, writers=writers, readers=readers, strikes=strikes, **told)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"this is no plan of a run: {error!r:.200}") from None


def _node(told: Mapping[str, Any]) -> NodePlan:
    given = dict(told)
    given["sinks"] = tuple(SinkPlan(**one) for one in given["sinks"])
    given["forward_to"] = tuple(given["forward_to"])
    given["jumps"] = tuple((at_s, by_s) for at_s, by_s in given["jumps"])
    return NodePlan(**given)
