"""delta-prop: one change of a fact reaches everything derived from it, in causal order, exactly once.

Public names are imported on first use. Sinks are in `delta_prop.sinks`, test helpers in `delta_prop.testing`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import delta_prop.platform.core_choice  # noqa: F401 - reads DELTA_PROP_CORE
from delta_prop_wire.errors import DeltaPropError, InvalidDelta, Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.api.producer import Producer
    from delta_prop.api.propagator import Propagator
    from delta_prop.api.settings import Settings
    from delta_prop.api.statistics import Statistics
    from delta_prop.api.synchronous import SyncPropagator
    from delta_prop.calls.outcomes import Delivered, OfferState, PublishAck
    from delta_prop.calls.receipt import Receipt
    from delta_prop.delivery.backpressure.pacer import Pressure
    from delta_prop.delivery.held_deltas import QuarantinedDelta
    from delta_prop.delivery.redelivery import ReplayResult
    from delta_prop.delivery.subscription import Subscription
    from delta_prop.hosting.streams import Streams
    from delta_prop_broker.log.settings import LogSettings
    from delta_prop_wire.delta import (
        ABSENT,
        AckLevel,
        Delta,
        Dot,
        Kind,
        Operation,
        Priority,
        Source,
        create,
        delete,
        dense,
        metadata_only,
        offset,
        opaque,
        scale,
        sparse,
        sparse_add,
        transform,
    )
    from delta_prop_wire.jsonlines import delta_from_line, delta_to_json

_NAMES_OF_MODULE = {
    "delta_prop.delivery.backpressure.pacer": ("Pressure",),
    "delta_prop.api.settings": ("Settings",),
    "delta_prop.api.propagator": ("Propagator",),
    "delta_prop.api.producer": ("Producer",),
    "delta_prop.calls.outcomes": ("Delivered", "PublishAck", "OfferState"),
    "delta_prop.calls.receipt": ("Receipt",),
    "delta_prop.delivery.redelivery": ("ReplayResult",),
    "delta_prop.delivery.held_deltas": ("QuarantinedDelta",),
    "delta_prop.delivery.subscription": ("Subscription",),
    "delta_prop.hosting.streams": ("Streams",),
    "delta_prop.api.statistics": ("Statistics",),
    "delta_prop.api.synchronous": ("SyncPropagator",),
    "delta_prop_broker.log.settings": ("LogSettings",),
    "delta_prop_wire.delta": (
        "ABSENT",
        "AckLevel",
        "Delta",
        "Dot",
        "Kind",
        "Operation",
        "Priority",
        "Source",
        "create",
        "delete",
        "dense",
        "metadata_only",
        "offset",
        "opaque",
        "scale",
        "sparse",
        "sparse_add",
        "transform",
    ),
    "delta_prop_wire.errors": ("DeltaPropError", "InvalidDelta", "Refused", "UsageError"),
    "delta_prop_wire.jsonlines": ("delta_from_line", "delta_to_json"),
    "delta_prop_wire.spec": ("ErrorCode",),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF_MODULE.items() for name in names}

__all__ = [  # noqa: RUF022 - sorted in reading order, not by name
    "Propagator",
    "SyncPropagator",
    "Streams",
    "Settings",
    "LogSettings",
    "Statistics",
    "Producer",
    "PublishAck",
    "Receipt",
    "OfferState",
    "Subscription",
    "Delivered",
    "Pressure",
    "QuarantinedDelta",
    "ReplayResult",
    "Delta",
    "Operation",
    "Dot",
    "ABSENT",
    "Kind",
    "Priority",
    "Source",
    "AckLevel",
    "create",
    "dense",
    "sparse",
    "sparse_add",
    "scale",
    "offset",
    "transform",
    "delete",
    "opaque",
    "metadata_only",
    "delta_from_line",
    "delta_to_json",
    "DeltaPropError",
    "InvalidDelta",
    "Refused",
    "UsageError",
    "ErrorCode",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        value = globals()[name] = version("delta-prop")
        return value
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
