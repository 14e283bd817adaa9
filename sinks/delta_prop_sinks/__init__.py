"""Sinks: what spends deltas, and the contract that each of them keeps."""

from delta_prop_sinks.cache import CacheSink, CacheStatistics
from delta_prop_sinks.callback import CallbackSink, CallbackStatistics
from delta_prop_sinks.conformance import Applied, NotConforming, check_sink
from delta_prop_sinks.forwarding import ForwardSink, ForwardStatistics
from delta_prop_sinks.index import Hit, IndexSink, IndexStatistics
from delta_prop_sinks.jsonlines import JsonLinesSink, JsonLinesStatistics
from delta_prop_sinks.linking import Linked, LinkedStatistics
from delta_prop_sinks.resident import Resident
from delta_prop_sinks.resident_statistics import ResidentStatistics
from delta_prop_sinks.sink import (
    Backlog,
    Delivery,
    HasBackground,
    HasBacklog,
    Rebuilds,
    RejectDelta,
    ResumePoint,
    Sink,
    SinkContext,
    SinkFailure,
    StopSink,
    TryAgain,
)
from delta_prop_sinks.storage import StorageSink, StorageStatistics
from delta_prop_wire.states import StateRow

__all__ = [
    "Applied",
    "Backlog",
    "CacheSink",
    "CacheStatistics",
    "CallbackSink",
    "CallbackStatistics",
    "Delivery",
    "ForwardSink",
    "ForwardStatistics",
    "HasBackground",
    "HasBacklog",
    "Hit",
    "IndexSink",
    "IndexStatistics",
    "JsonLinesSink",
    "JsonLinesStatistics",
    "Linked",
    "LinkedStatistics",
    "NotConforming",
    "Rebuilds",
    "RejectDelta",
    "Resident",
    "ResidentStatistics",
    "ResumePoint",
    "Sink",
    "SinkContext",
    "SinkFailure",
    "StateRow",
    "StopSink",
    "StorageSink",
    "StorageStatistics",
    "TryAgain",
    "check_sink",
]
