"""Sinks: what spends deltas, and the contract that each of them keeps."""

from delta_prop_sinks.resident import Resident, ResidentStatistics
from delta_prop_sinks.sink import (
    Delivery,
    HasBackground,
    RejectDelta,
    ResumePoint,
    Sink,
    SinkContext,
    SinkFailure,
    StopSink,
    TryAgain,
)
from delta_prop_sinks.storage import StorageSink, StorageStatistics

__all__ = [
    "Delivery",
    "HasBackground",
    "RejectDelta",
    "Resident",
    "ResidentStatistics",
    "ResumePoint",
    "Sink",
    "SinkContext",
    "SinkFailure",
    "StopSink",
    "StorageSink",
    "StorageStatistics",
    "TryAgain",
]
