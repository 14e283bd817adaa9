"""Sinks: consumers of deltas, and the contract that each of them follows. Names are loaded on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delta_prop_sinks.cache import CacheSink, CacheStatistics
    from delta_prop_sinks.callback import CallbackSink, CallbackStatistics
    from delta_prop_sinks.conformance import Applied, ContractViolation, check_sink
    from delta_prop_sinks.folding import fold_again, must_fold_again
    from delta_prop_sinks.forwarding import ForwardSink, ForwardStatistics
    from delta_prop_sinks.hnsw_builder import Hnsw, HnswStatistics
    from delta_prop_sinks.index import Hit, IndexSink, IndexStatistics
    from delta_prop_sinks.jsonlines import JsonLinesSink, JsonLinesStatistics
    from delta_prop_sinks.resident import ResidentVectors
    from delta_prop_sinks.resident_tables import ResidentStatistics
    from delta_prop_sinks.sink import (
        Backlog,
        Delivery,
        HasBackground,
        HasBacklog,
        HoldsTombstones,
        Rebuildable,
        RejectDelta,
        ResumePoint,
        Sink,
        SinkContext,
        SinkFailure,
        StopSink,
        TryAgain,
    )
    from delta_prop_sinks.storage import StorageSink, StorageStatistics
    from delta_prop_wire.algebra import VectorState, fold
    from delta_prop_wire.cursor import Cursor
    from delta_prop_wire.state_rows import StateRow

_HOMES = {
    "delta_prop_sinks.cache": ("CacheSink", "CacheStatistics"),
    "delta_prop_sinks.callback": ("CallbackSink", "CallbackStatistics"),
    "delta_prop_sinks.conformance": ("Applied", "ContractViolation", "check_sink"),
    "delta_prop_sinks.folding": ("fold_again", "must_fold_again"),
    "delta_prop_sinks.forwarding": ("ForwardSink", "ForwardStatistics"),
    "delta_prop_sinks.index": ("Hit", "IndexSink", "IndexStatistics"),
    "delta_prop_sinks.jsonlines": ("JsonLinesSink", "JsonLinesStatistics"),
    "delta_prop_sinks.hnsw_builder": ("Hnsw", "HnswStatistics"),
    "delta_prop_sinks.resident": ("ResidentVectors",),
    "delta_prop_sinks.resident_tables": ("ResidentStatistics",),
    "delta_prop_sinks.sink": (
        "Backlog",
        "Delivery",
        "HasBackground",
        "HasBacklog",
        "HoldsTombstones",
        "Rebuildable",
        "RejectDelta",
        "ResumePoint",
        "Sink",
        "SinkContext",
        "SinkFailure",
        "StopSink",
        "TryAgain",
    ),
    "delta_prop_sinks.storage": ("StorageSink", "StorageStatistics"),
    "delta_prop_wire.algebra": ("VectorState", "fold"),
    "delta_prop_wire.cursor": ("Cursor",),
    "delta_prop_wire.state_rows": ("StateRow",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Applied",
    "Backlog",
    "CacheSink",
    "CacheStatistics",
    "CallbackSink",
    "CallbackStatistics",
    "ContractViolation",
    "Cursor",
    "Delivery",
    "ForwardSink",
    "ForwardStatistics",
    "HasBackground",
    "HasBacklog",
    "Hit",
    "Hnsw",
    "HnswStatistics",
    "HoldsTombstones",
    "IndexSink",
    "IndexStatistics",
    "JsonLinesSink",
    "JsonLinesStatistics",
    "Rebuildable",
    "RejectDelta",
    "ResidentStatistics",
    "ResidentVectors",
    "ResumePoint",
    "Sink",
    "SinkContext",
    "SinkFailure",
    "StateRow",
    "StopSink",
    "StorageSink",
    "StorageStatistics",
    "TryAgain",
    "VectorState",
    "check_sink",
    "fold",
    "fold_again",
    "must_fold_again",
]


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
