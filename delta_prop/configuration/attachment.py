"""Creates the sinks of a configuration, with the options each is attached with."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import delta_prop_sinks as sinks  # what a sink needs is loaded where one is made
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
from delta_prop.ports import Tls
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Container

    from delta_prop.embedded import Propagator
    from delta_prop_sinks import ResidentVectors, Sink

_COMMON_KEYS = frozenset(one.name for one in fields(SinkConfig))


@dataclass(frozen=True, slots=True)
class Attachment:
    """A sink and the options to attach it with."""

    sink: Sink
    config: SinkConfig

    async def attach(self, to: Propagator, remembered: Container[str]) -> None:
        """Attach it; a remembered sink resumes from its cursor. Raises as `Propagator.attach`."""
        config = self.config
        await to.attach(
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
    """Create the sinks, in the order in which they are attached. Raises UsageError with the sink's path."""
    residents: dict[str, ResidentVectors] = {}
    rebuilt = {one.name for one in configs if one.rebuild}
    made: list[Attachment] = []
    for index, one in enumerate(configs):
        shared = getattr(one, "vectors", None)  # an index holds the vectors of this storage sink
        try:
            sink = _make_sink(one, residents)
            made.append(Attachment(sink, replace(one, rebuild=one.rebuild or shared in rebuilt)))
        except UsageError as error:
            raise with_path(error, f"sinks[{index}]", [key.name for key in fields(one)]) from None
    return tuple(made)


def _make_sink(config: SinkConfig, residents: dict[str, ResidentVectors]) -> Sink:
    own: dict[str, Any] = {one.name: getattr(config, one.name) for one in fields(config)}
    own = {name: value for name, value in own.items() if name not in _COMMON_KEYS} | {"name": config.name}
    if isinstance(config, StorageConfig):
        resident = sinks.ResidentVectors(resident_bytes_max=own.pop("resident_bytes_max"))
        residents[config.name] = resident
        return sinks.StorageSink(own.pop("path"), resident=resident, **own)
    if isinstance(config, IndexConfig):
        bytes_max, vectors = own.pop("resident_bytes_max"), own.pop("vectors")
        shared = None if vectors is None else residents[vectors]
        return sinks.IndexSink(resident=shared or sinks.ResidentVectors(resident_bytes_max=bytes_max), **own)
    if isinstance(config, CacheConfig):
        return sinks.CacheSink(**own)
    if isinstance(config, JsonLinesConfig):
        return sinks.JsonLinesSink(own.pop("path"), **own)
    assert isinstance(config, ForwardConfig)
    tls = None
    if config.authorities is not None:
        tls = Tls(authorities=config.authorities, server_name=config.server_name)
    return sinks.ForwardSink(
        ForwardLink(config.to, token=config.token, tls=tls, name=config.name), name=config.name
    )
