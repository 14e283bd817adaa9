"""The sinks that come with delta-prop, and the contract for custom ones; imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delta_prop_sinks import (
        Applied,
        Backlog,
        CacheSink,
        CallbackSink,
        ContractViolation,
        Cursor,
        Delivery,
        ForwardSink,
        HasBackground,
        HasBacklog,
        Hit,
        Hnsw,
        HoldsTombstones,
        IndexSink,
        JsonLinesSink,
        Rebuildable,
        RejectDelta,
        ResidentVectors,
        ResumePoint,
        Sink,
        SinkContext,
        SinkFailure,
        StateRow,
        StopSink,
        StorageSink,
        TryAgain,
        VectorState,
        check_sink,
        fold,
        fold_again,
        must_fold_again,
    )

__all__ = [
    "Applied",
    "Backlog",
    "CacheSink",
    "CallbackSink",
    "ContractViolation",
    "Cursor",
    "Delivery",
    "ForwardSink",
    "HasBackground",
    "HasBacklog",
    "Hit",
    "Hnsw",
    "HoldsTombstones",
    "IndexSink",
    "JsonLinesSink",
    "Rebuildable",
    "RejectDelta",
    "ResidentVectors",
    "ResumePoint",
    "Sink",
    "SinkContext",
    "SinkFailure",
    "StateRow",
    "StopSink",
    "StorageSink",
    "TryAgain",
    "VectorState",
    "check_sink",
    "fold",
    "fold_again",
    "must_fold_again",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module("delta_prop_sinks"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
