"""Creates the sinks of a configuration, each with the options to attach it with."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import delta_prop_sinks as sinks  # lazy: a kind's dependencies are imported when such a sink is created
from delta_prop.client.forwarding import ForwardLink
from delta_prop.configuration.sinks import (
    CacheConfig,
    ForwardConfig,
    IndexConfig,
    JsonLinesConfig,
    SinkConfig,
    StorageConfig,
)
from delta_prop.configuration.values import with_path
from delta_prop.platform.ports import Tls
from delta_prop_sinks import ResidentVectors, Sink
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from delta_prop.api.propagator import Propagator

_COMMON_KEYS = frozenset(key.name for key in fields(SinkConfig))


@dataclass(frozen=True, slots=True)
class Attachment:
    """A sink and the options to attach it with."""

    sink: Sink
    config: SinkConfig

    async def attach(self, propagator: Propagator, remembered: Container[str]) -> None:
        """Attach the sink; if its name is in `remembered`, it resumes from its cursor.

        Raises what `Propagator.attach` raises.
        """
        config = self.config
        await propagator.attach(
            self.sink,
            name=config.name,
            topics=config.topics,
            start="resume" if config.name in remembered else config.start,
            required=config.required,
            pacing=config.pacing,
            on_log_full=config.on_log_full,
            batch_deltas=config.batch_deltas,
            linger_ms=config.linger_ms,
            rebuild=config.rebuild,
        )


def make_sinks(configs: tuple[SinkConfig, ...]) -> tuple[Attachment, ...]:
    """Create the sinks, in the order in which they are attached. Raises UsageError that names the sink."""
    residents: dict[str, ResidentVectors] = {}
    rebuilt_names = {config.name for config in configs if config.rebuild}
    attachments: list[Attachment] = []
    for index, config in enumerate(configs):
        storage_name = getattr(config, "vectors", None)  # the storage sink whose vectors an index shares
        try:
            sink = _make_sink(config, residents)
            attachments.append(
                Attachment(sink, replace(config, rebuild=config.rebuild or storage_name in rebuilt_names))
            )
        except UsageError as error:
            raise with_path(error, f"sinks[{index}]", [key.name for key in fields(config)]) from None
    return tuple(attachments)


def _make_sink(config: SinkConfig, residents: dict[str, ResidentVectors]) -> Sink:
    options: dict[str, Any] = {
        key.name: getattr(config, key.name) for key in fields(config) if key.name not in _COMMON_KEYS
    }
    options["name"] = config.name
    if isinstance(config, StorageConfig):
        resident = sinks.ResidentVectors(resident_bytes_max=options.pop("resident_bytes_max"))
        residents[config.name] = resident
        return sinks.StorageSink(options.pop("path"), resident=resident, **options)
    if isinstance(config, IndexConfig):
        bytes_max, vectors = options.pop("resident_bytes_max"), options.pop("vectors")
        shared = None if vectors is None else residents[vectors]
        return sinks.IndexSink(
            resident=shared or sinks.ResidentVectors(resident_bytes_max=bytes_max), **options
        )
    if isinstance(config, CacheConfig):
        return sinks.CacheSink(**options)
    if isinstance(config, JsonLinesConfig):
        return sinks.JsonLinesSink(options.pop("path"), **options)
    assert isinstance(config, ForwardConfig)
    tls = None
    if config.authorities is not None:
        tls = Tls(authorities=config.authorities, server_name=config.server_name)
    return sinks.ForwardSink(
        ForwardLink(config.to, token=config.token, tls=tls, name=config.name), name=config.name
    )
