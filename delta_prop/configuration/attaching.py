"""The sinks of a configuration, made: the objects, and what each is attached with."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import delta_prop_sinks as sinks  # what a sink needs is loaded where one is made
from delta_prop.client.forwarding import ForwardLink
from delta_prop.configuration.sinks import (
    CacheTerms,
    ForwardTerms,
    IndexTerms,
    JsonLinesTerms,
    SinkTerms,
    StorageTerms,
)
from delta_prop.configuration.values import placed
from delta_prop.ports import Tls
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Container

    from delta_prop.embedded import Propagator
    from delta_prop_sinks import Resident, Sink

_COMMON = frozenset(one.name for one in fields(SinkTerms))


@dataclass(frozen=True, slots=True)
class Attachment:
    """A sink and its terms."""

    sink: Sink
    terms: SinkTerms

    async def attach(self, to: Propagator, remembered: Container[str]) -> None:
        """Attach it: one that is remembered goes on where it stopped. Raises as `Propagator.attach`."""
        terms = self.terms
        await to.attach(
            self.sink,
            name=terms.name,
            topics=terms.topics,
            start="resume" if terms.name in remembered else terms.start,
            required=terms.required,
            pacing=terms.pacing,
            on_log_full=terms.on_log_full,
            batch_deltas=terms.batch_deltas,
            linger_ms_max=terms.linger_ms_max,
            rebuild=terms.rebuild,
        )


def make_sinks(terms: tuple[SinkTerms, ...]) -> tuple[Attachment, ...]:
    """The sinks, in the order in which they are attached. Raises UsageError with the place of the one."""
    residents: dict[str, Resident] = {}
    rebuilt = {one.name for one in terms if one.rebuild}
    made: list[Attachment] = []
    for place, one in enumerate(terms):
        shared = getattr(one, "vectors", None)  # which are what an index holds
        try:
            sink = _made(one, residents)
            made.append(Attachment(sink, replace(one, rebuild=one.rebuild or shared in rebuilt)))
        except UsageError as error:
            raise placed(error, f"sinks[{place}]", [key.name for key in fields(one)]) from None
    return tuple(made)


def _made(terms: SinkTerms, residents: dict[str, Resident]) -> Sink:
    own: dict[str, Any] = {one.name: getattr(terms, one.name) for one in fields(terms)}
    own = {name: value for name, value in own.items() if name not in _COMMON} | {"name": terms.name}
    if isinstance(terms, StorageTerms):
        resident = sinks.Resident(resident_bytes_max=own.pop("resident_bytes_max"))
        residents[terms.name] = resident
        return sinks.StorageSink(own.pop("path"), resident=resident, **own)
    if isinstance(terms, IndexTerms):
        bytes_max, vectors = own.pop("resident_bytes_max"), own.pop("vectors")
        shared = None if vectors is None else residents[vectors]
        return sinks.IndexSink(resident=shared or sinks.Resident(resident_bytes_max=bytes_max), **own)
    if isinstance(terms, CacheTerms):
        return sinks.CacheSink(**own)
    if isinstance(terms, JsonLinesTerms):
        return sinks.JsonLinesSink(own.pop("path"), **own)
    assert isinstance(terms, ForwardTerms)
    tls = None
    if terms.authorities is not None:
        tls = Tls(authorities=terms.authorities, server_name=terms.server_name)
    return sinks.ForwardSink(
        ForwardLink(terms.to, token=terms.token, tls=tls, name=terms.name), name=terms.name
    )
