"""Clients of a service: all that a program needs to talk to `delta-prop serve`.

The public names are loaded on first use, so a script that only publishes loads no event loop.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delta_prop.client.errors import Unreachable
    from delta_prop.client.forwarding import ForwardLink
    from delta_prop.client.producer import Producer
    from delta_prop.client.settings import ClientSettings
    from delta_prop.client.stream_producer import StreamProducer
    from delta_prop.client.stream_subscriber import StreamSubscriber
    from delta_prop.client.subscriber import Subscriber
    from delta_prop.client.sync_producer import SyncProducer, SyncReceipt

_HOME_OF = {
    "ClientSettings": "delta_prop.client.settings",
    "ForwardLink": "delta_prop.client.forwarding",
    "Producer": "delta_prop.client.producer",
    "StreamProducer": "delta_prop.client.stream_producer",
    "StreamSubscriber": "delta_prop.client.stream_subscriber",
    "Subscriber": "delta_prop.client.subscriber",
    "SyncProducer": "delta_prop.client.sync_producer",
    "SyncReceipt": "delta_prop.client.sync_producer",
    "Unreachable": "delta_prop.client.errors",
}

__all__ = [
    "ClientSettings",
    "ForwardLink",
    "Producer",
    "StreamProducer",
    "StreamSubscriber",
    "Subscriber",
    "SyncProducer",
    "SyncReceipt",
    "Unreachable",
]


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
