"""Scenarios read from TOML: the scenario as it is written, then each of its alternatives.

Every mistake is a UsageError that names the place, the value and the cure.
"""

from __future__ import annotations

import tomllib
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from delta_prop.config import Settings
from delta_prop.configuration.values import check_keys, converted, fault, join, made_of, shown, suggested
from delta_prop_broker.log.settings import LogSettings
from delta_prop_simulations.laboratory.scenario import (
    AlternativeSpec,
    Event,
    Scenario,
    Service,
    SourceSpec,
)
from delta_prop_simulations.laboratory.topology import Cut, FaultSpec, LinkSpec, ReaderSpec, Stall
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")

UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
DURATIONS = frozenset(
    {"duration", "start", "stop", "on", "off", "period", "from", "for", "by", "clock_ahead"}
)
"""Keys whose values are times: a number of seconds, or a text such as "90s", "1.5m", "1h", "200ms"."""

EVENT_KEYS = {"from": "begin", "for": "lasts", "what": "what", "factor": "factor", "share": "share"}


@dataclass(frozen=True, slots=True)
class Setup:
    """One alternative with everything that holds in it."""

    name: str
    about: str
    scenario: Scenario


def read_setups(
    text: str, *, seed: int | None = None, duration: float | None = None, trace: str | None = None
) -> list[Setup]:
    """The scenario as written and its alternatives, in order; `seed` and `duration` in place of its own.

    `trace`: recorded traffic that every source replays, in place of what it draws.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"this is no TOML: {error}") from None
    given = {"seed": seed, "duration": duration}
    given = {key: value for key, value in given.items() if value is not None}
    table |= given
    if trace is not None:
        _replay(table, trace)
    alternatives = _alternatives(table.pop("alternative", []))
    base = _scenario(table)
    if duration is None:  # a shorter one for once leaves out what begins later
        _check_times(base)
    setups = [Setup(base.base, base.about, base)]
    for place, one in enumerate(alternatives):
        path = f"alternative[{place}]"
        if one.name in {setup.name for setup in setups}:
            raise UsageError(f"{path}.name: there is one named {one.name!r} already: rename it")
        changed = _changed(table, one, path) | given
        try:
            setups.append(Setup(one.name, one.about, _scenario(changed)))
            if duration is None:
                _check_times(setups[-1].scenario)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None
    return setups


def parse_duration(value: object, path: str) -> float:
    """Seconds of a number, or of a text with a unit. Raises UsageError."""
    if not isinstance(value, str):
        return float(converted(value, float, path))
    text = value.strip()
    unit = next((unit for unit in ("ms", "s", "m", "h") if text.endswith(unit)), "")
    try:
        return float(text.removesuffix(unit)) * UNITS_S[unit or "s"]
    except ValueError:
        raise fault(
            path, value, f'{shown(value)} is no time: give seconds, or "200ms", "90s", "5m", "1h"'
        ) from None


def _replay(table: dict[str, Any], trace: str) -> None:
    sources = table.get("source")
    for one in sources if isinstance(sources, list) else []:
        if isinstance(one, dict):
            one |= {"pattern": "replay", "trace": trace}


# --- the tables


def _scenario(table: dict[str, Any]) -> Scenario:
    table = deepcopy(table)
    check_keys(table, [one.name for one in fields(Scenario)], "")
    service = _service(table.pop("service", {}))
    for name, one in _events_of(table):
        one["at"] = [_event(event, f"{name}.at[{place}]") for place, event in enumerate(_list(one, name))]
    events = {name: one.pop("at") for name, one in _events_of(table)}
    links = [_link(one, f"link[{place}]") for place, one in enumerate(_tables(table, "link"))]
    faults = [_timed(FaultSpec, one, f"fault[{place}]") for place, one in enumerate(_tables(table, "fault"))]
    readers = [_reader(one, f"reader[{place}]") for place, one in enumerate(_tables(table, "reader"))]
    _durations(table, "")
    scenario = made_of(Scenario, table, "")
    sinks = [
        replace(sink, at=tuple(events.get(f"sink[{place}]", ()))) for place, sink in enumerate(scenario.sink)
    ]
    _check_levels(scenario.source, service)
    return replace(
        scenario,
        service=service,
        sink=tuple(sinks),
        link=tuple(links),
        fault=tuple(faults),
        reader=tuple(readers),
    )


def _check_times(scenario: Scenario) -> None:
    """See that nothing begins when the scenario is over, but for what may strike while all come to rest: cuts
    of links and stalls of readers. Raises UsageError.
    """
    begins = {f"source[{place}].start": one.start for place, one in enumerate(scenario.source)}
    begins |= {f"fault[{place}].from": one.begin for place, one in enumerate(scenario.fault)}
    begins |= {f"reader[{place}].from": one.begin for place, one in enumerate(scenario.reader)}
    for place, sink in enumerate(scenario.sink):
        begins |= {f"sink[{place}].at[{event}].from": one.begin for event, one in enumerate(sink.at)}
    for path, begin in begins.items():
        if begin >= scenario.duration:
            raise UsageError(f"{path} = {begin}: give a time below duration, which is {scenario.duration}")


def _check_levels(sources: tuple[SourceSpec, ...], service: Service) -> None:
    """See that the log can keep what sources ask for. Raises UsageError."""
    for place, one in enumerate(sources):
        if service.log is None and one.ack_level not in (None, AckLevel.MEMORY):
            raise UsageError(
                f"source[{place}].ack_level = {one.ack_level.name.lower()}: a log in memory acknowledges as "
                "memory alone: leave it out, or add [service.log] for a log on disk"
            )


def _tables(table: dict[str, Any], name: str) -> list[Any]:
    found = table.pop(name, [])
    if not isinstance(found, list):
        raise fault(name, found, f"write [[{name}]] above each")
    return found


def _link(table: Any, path: str) -> LinkSpec:
    cuts = _tables(table, "cut") if isinstance(table, dict) else []
    made: LinkSpec = converted(table, LinkSpec, path)
    return replace(
        made, cut=tuple(_timed(Cut, one, f"{path}.cut[{place}]") for place, one in enumerate(cuts))
    )


def _reader(table: Any, path: str) -> ReaderSpec:
    stalls = _tables(table, "stall") if isinstance(table, dict) else []
    made = _timed(ReaderSpec, {"from": 0.0, **table} if isinstance(table, dict) else table, path)
    return replace(
        made, stall=tuple(_timed(Stall, one, f"{path}.stall[{place}]") for place, one in enumerate(stalls))
    )


def _timed(kind: type[T], table: Any, path: str) -> T:
    """What begins at a time: by hand, since `from` and `for` cannot be names of fields."""
    if not isinstance(table, dict):
        raise fault(path, table, f"{shown(table)} is no table: give from and for")
    own = {one.name: one.name for one in fields(kind) if one.name not in ("begin", "lasts")}  # type: ignore[arg-type]
    keys = {"from": "begin", "for": "lasts"} | own
    check_keys(table, keys, path)
    if "from" not in table:
        raise UsageError(f"{path}.from: it is missing, and has no default: add it")
    _durations(table, path)
    return made_of(kind, {keys[key]: value for key, value in table.items()}, path)


def _service(table: Any) -> Service:
    if not isinstance(table, dict):
        raise fault("service", table, f"{shown(table)} is no table: give keys and values below [service]")
    log = table.pop("log", "memory")
    if not isinstance(log, dict) and log != "memory":
        raise fault("service.log", log, f'{shown(log)}: give "memory", or a table of a log on disk')
    own = {"disk_ms_max": table.pop("disk_ms_max")} if "disk_ms_max" in table else {}
    check_keys(table, [*(one.name for one in fields(Settings)), "log", "disk_ms_max"], "service")
    return Service(
        made_of(Settings, table, "service"),
        made_of(LogSettings, log, "service.log") if isinstance(log, dict) else None,
        **{key: converted(value, float, f"service.{key}") for key, value in own.items()},
    )


def _events_of(table: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    sinks = table.get("sink")
    for place, one in enumerate(sinks if isinstance(sinks, list) else []):
        if isinstance(one, dict) and "at" in one:
            yield f"sink[{place}]", one


def _list(table: dict[str, Any], path: str) -> list[Any]:
    at = table["at"]
    if not isinstance(at, list):
        raise fault(
            f"{path}.at", at, f'{shown(at)}: give a list, as [{{from = "1s", for = "2s", what = "fails"}}]'
        )
    return at


def _event(table: Any, path: str) -> Event:
    """By hand: `from` and `for` cannot be names of fields."""
    if not isinstance(table, dict):
        raise fault(path, table, f"{shown(table)} is no table: give from, for and what")
    check_keys(table, EVENT_KEYS, path)
    for key in ("from", "for", "what"):
        if key not in table:
            raise UsageError(f"{path}.{key}: it is missing, and has no default: add it")
    _durations(table, path)
    return made_of(Event, {EVENT_KEYS[key]: value for key, value in table.items()}, path)


def _durations(table: Any, path: str) -> None:
    """Make seconds of every time in a table and in those below it."""
    if isinstance(table, list):
        for place, one in enumerate(table):
            _durations(one, f"{path}[{place}]")
    elif isinstance(table, dict):
        for key, value in table.items():
            if key in DURATIONS:
                table[key] = parse_duration(value, join(path, key))
            else:
                _durations(value, join(path, key))


# --- alternatives


def _alternatives(tables: Any) -> list[AlternativeSpec]:
    if not isinstance(tables, list):
        raise fault("alternative", tables, "write [[alternative]] above each")
    made = []
    for place, table in enumerate(tables):
        path = f"alternative[{place}]"
        changes = table.pop("set", {}) if isinstance(table, dict) else {}
        if not isinstance(changes, dict):
            raise fault(
                f"{path}.set", changes, f'{shown(changes)}: give a table, as {{"sink.index.pacing" = true}}'
            )
        spec: AlternativeSpec = converted(table, AlternativeSpec, path)
        made.append(replace(spec, set=changes))
    return made


def _changed(table: dict[str, Any], spec: AlternativeSpec, path: str) -> dict[str, Any]:
    """The scenario's table with an alternative's values."""
    changed = deepcopy(table)
    for name in spec.without:
        _leave_out(changed, name, f"{path}.without")
    for place, value in spec.set.items():
        *above, last = place.split(".")
        here: Any = changed
        for part in above:
            here = _below(here, part, f"{path}.set.{place!r}")
        here[last] = value
    return changed


def _below(here: dict[str, Any], part: str, path: str) -> dict[str, Any]:
    """The table that a part of a path names: a key, or the name of one of several tables."""
    if part in here and isinstance(found := here[part], list):
        return {str(one.get("name")): one for one in found if isinstance(one, dict)}
    if part not in here and all(isinstance(one, dict) and one.get("name") for one in here.values()) and here:
        raise UsageError(f"{path}: there is no {part!r}{suggested(part, here)}")
    below = here.setdefault(part, {})
    if not isinstance(below, dict):
        raise UsageError(f"{path}: {part} is one value, and has nothing below it")
    return below


def _leave_out(table: dict[str, Any], name: str, path: str) -> None:
    """Drop the table of that path, such as `sink.index`."""
    kind, _, own = name.partition(".")
    found = table.get(kind)
    names = (
        [str(one.get("name")) for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    )
    if own not in names:
        raise UsageError(f"{path}: there is no {name!r}{suggested(own, names)}; give one as sink.NAME")
    assert isinstance(found, list)
    table[kind] = [one for one in found if one.get("name") != own]
    if not table[kind] and kind in ("source", "sink"):
        raise UsageError(f"{path}: without {name!r} no {kind} is left: leave at least one in")
