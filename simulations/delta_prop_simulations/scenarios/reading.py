"""Reads scenarios from TOML: the scenario as it is written, then each of its alternatives.

Every error is a UsageError that names the field, the value and the fix.
"""

from __future__ import annotations

import tomllib
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from delta_prop.config import Settings
from delta_prop.configuration.values import (
    build_dataclass,
    check_keys,
    convert,
    format_value,
    join_path,
    suggest,
    value_error,
)
from delta_prop_broker.log.settings import LogSettings
from delta_prop_simulations.scenarios.scenario import (
    AlternativeSpec,
    Event,
    Scenario,
    Service,
    SourceSpec,
)
from delta_prop_simulations.scenarios.topology import Cut, FaultSpec, LinkSpec, ReaderSpec, Stall
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
    """One alternative: its name, its description, and the scenario with its values."""

    name: str
    about: str
    scenario: Scenario


def read_setups(
    text: str, *, seed: int | None = None, duration: float | None = None, trace: str | None = None
) -> list[Setup]:
    """Return the scenario as written and its alternatives, in order; `seed` and `duration` override its own.

    `trace`: recorded traffic that every source replays, in place of drawn traffic.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"the scenario is not valid TOML: {error}") from None
    given = {"seed": seed, "duration": duration}
    given = {key: value for key, value in given.items() if value is not None}
    table |= given
    if trace is not None:
        _replay(table, trace)
    alternatives = _alternatives(table.pop("alternative", []))
    base = _scenario(table)
    if duration is None:  # an overridden duration may end before some events begin
        _check_times(base)
    setups = [Setup(base.base, base.about, base)]
    for place, one in enumerate(alternatives):
        path = f"alternative[{place}]"
        if one.name in {setup.name for setup in setups}:
            raise UsageError(f"{path}.name {one.name!r}: already used: choose another name")
        changed = _apply_alternative(table, one, path) | given
        try:
            setups.append(Setup(one.name, one.about, _scenario(changed)))
            if duration is None:
                _check_times(setups[-1].scenario)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None
    return setups


def parse_duration(value: object, path: str) -> float:
    """Return the seconds of a number, or of a text with a unit. Raises UsageError."""
    if not isinstance(value, str):
        return float(convert(value, float, path))
    text = value.strip()
    unit = next((unit for unit in ("ms", "s", "m", "h") if text.endswith(unit)), "")
    try:
        return float(text.removesuffix(unit)) * UNITS_S[unit or "s"]
    except ValueError:
        raise value_error(
            path, value, f'{format_value(value)} is not a time: give seconds, or "200ms", "90s", "5m", "1h"'
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
        one["faults"] = [
            _event(event, f"{name}.faults[{place}]") for place, event in enumerate(_list(one, name))
        ]
    events = {name: one.pop("faults") for name, one in _events_of(table)}
    links = [_link(one, f"link[{place}]") for place, one in enumerate(_tables(table, "link"))]
    faults = [
        _read_timed(FaultSpec, one, f"fault[{place}]") for place, one in enumerate(_tables(table, "fault"))
    ]
    readers = [_reader(one, f"reader[{place}]") for place, one in enumerate(_tables(table, "reader"))]
    _parse_durations(table, "")
    scenario = build_dataclass(Scenario, table, "")
    sinks = [
        replace(sink, faults=tuple(events.get(f"sink[{place}]", ())))
        for place, sink in enumerate(scenario.sink)
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
    """Check that nothing begins after the scenario's end, except link cuts and reader stalls, which may begin
    while the services come to rest. Raises UsageError.
    """
    begins = {f"source[{place}].start": one.start for place, one in enumerate(scenario.source)}
    begins |= {f"fault[{place}].from": one.begin for place, one in enumerate(scenario.fault)}
    begins |= {f"reader[{place}].from": one.begin for place, one in enumerate(scenario.reader)}
    for place, sink in enumerate(scenario.sink):
        begins |= {f"sink[{place}].faults[{event}].from": one.begin for event, one in enumerate(sink.faults)}
    for path, begin in begins.items():
        if begin >= scenario.duration:
            raise UsageError(f"{path} = {begin}: give a time below duration, which is {scenario.duration}")


def _check_levels(sources: tuple[SourceSpec, ...], service: Service) -> None:
    """Check that the log supports the ack levels of the sources. Raises UsageError."""
    for place, one in enumerate(sources):
        if service.log is None and one.ack_level not in (None, AckLevel.MEMORY):
            raise UsageError(
                f"source[{place}].ack_level = {one.ack_level.name.lower()}: a log in memory supports only "
                "memory: remove it, or add [service.log] for a log on disk"
            )


def _tables(table: dict[str, Any], name: str) -> list[Any]:
    found = table.pop(name, [])
    if not isinstance(found, list):
        raise value_error(name, found, f"write [[{name}]] above each")
    return found


def _link(table: Any, path: str) -> LinkSpec:
    cuts = _tables(table, "cut") if isinstance(table, dict) else []
    made: LinkSpec = convert(table, LinkSpec, path)
    return replace(
        made, cut=tuple(_read_timed(Cut, one, f"{path}.cut[{place}]") for place, one in enumerate(cuts))
    )


def _reader(table: Any, path: str) -> ReaderSpec:
    stalls = _tables(table, "stall") if isinstance(table, dict) else []
    made = _read_timed(ReaderSpec, {"from": 0.0, **table} if isinstance(table, dict) else table, path)
    return replace(
        made,
        stall=tuple(_read_timed(Stall, one, f"{path}.stall[{place}]") for place, one in enumerate(stalls)),
    )


def _read_timed(kind: type[T], table: Any, path: str) -> T:
    """Read a table with a start time; by hand, since `from` and `for` cannot be names of fields."""
    if not isinstance(table, dict):
        raise value_error(path, table, f"{format_value(table)} is not a table: give from and for")
    own = {one.name: one.name for one in fields(kind) if one.name not in ("begin", "lasts")}  # type: ignore[arg-type]
    keys = {"from": "begin", "for": "lasts"} | own
    check_keys(table, keys, path)
    if "from" not in table:
        raise UsageError(f"{path}.from: it is missing, and has no default: add it")
    _parse_durations(table, path)
    return build_dataclass(kind, {keys[key]: value for key, value in table.items()}, path)


def _service(table: Any) -> Service:
    if not isinstance(table, dict):
        raise value_error(
            "service", table, f"{format_value(table)} is not a table: give keys and values below [service]"
        )
    log = table.pop("log", "memory")
    if not isinstance(log, dict) and log != "memory":
        raise value_error(
            "service.log", log, f'{format_value(log)}: give "memory", or a table for a log on disk'
        )
    own = {"disk_ms_max": table.pop("disk_ms_max")} if "disk_ms_max" in table else {}
    check_keys(table, [*(one.name for one in fields(Settings)), "log", "disk_ms_max"], "service")
    return Service(
        build_dataclass(Settings, table, "service"),
        build_dataclass(LogSettings, log, "service.log") if isinstance(log, dict) else None,
        **{key: convert(value, float, f"service.{key}") for key, value in own.items()},
    )


def _events_of(table: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    sinks = table.get("sink")
    for place, one in enumerate(sinks if isinstance(sinks, list) else []):
        if isinstance(one, dict) and "faults" in one:
            yield f"sink[{place}]", one


def _list(table: dict[str, Any], path: str) -> list[Any]:
    at = table["faults"]
    if not isinstance(at, list):
        raise value_error(
            f"{path}.faults",
            at,
            f'{format_value(at)}: give a list, as [{{from = "1s", for = "2s", what = "fails"}}]',
        )
    return at


def _event(table: Any, path: str) -> Event:
    """Read an event; by hand, since `from` and `for` cannot be names of fields."""
    if not isinstance(table, dict):
        raise value_error(path, table, f"{format_value(table)} is not a table: give from, for and what")
    check_keys(table, EVENT_KEYS, path)
    for key in ("from", "for", "what"):
        if key not in table:
            raise UsageError(f"{path}.{key}: it is missing, and has no default: add it")
    _parse_durations(table, path)
    return build_dataclass(Event, {EVENT_KEYS[key]: value for key, value in table.items()}, path)


def _parse_durations(table: Any, path: str) -> None:
    """Replace every time in a table, and in those below it, by its seconds."""
    if isinstance(table, list):
        for place, one in enumerate(table):
            _parse_durations(one, f"{path}[{place}]")
    elif isinstance(table, dict):
        for key, value in table.items():
            if key in DURATIONS:
                table[key] = parse_duration(value, join_path(path, key))
            else:
                _parse_durations(value, join_path(path, key))


# --- alternatives


def _alternatives(tables: Any) -> list[AlternativeSpec]:
    if not isinstance(tables, list):
        raise value_error("alternative", tables, "write [[alternative]] above each")
    made = []
    for place, table in enumerate(tables):
        path = f"alternative[{place}]"
        changes = table.pop("set", {}) if isinstance(table, dict) else {}
        if not isinstance(changes, dict):
            raise value_error(
                f"{path}.set",
                changes,
                f'{format_value(changes)}: give a table, as {{"sink.index.pacing" = true}}',
            )
        spec: AlternativeSpec = convert(table, AlternativeSpec, path)
        made.append(replace(spec, set=changes))
    return made


def _apply_alternative(table: dict[str, Any], spec: AlternativeSpec, path: str) -> dict[str, Any]:
    """Return the scenario's table with an alternative's values."""
    changed = deepcopy(table)
    for name in spec.without:
        _leave_out(changed, name, f"{path}.without")
    for place, value in spec.set.items():
        *above, last = place.split(".")
        here: Any = changed
        for part in above:
            here = _table_below(here, part, f"{path}.set.{place!r}")
        here[last] = value
    return changed


def _table_below(here: dict[str, Any], part: str, path: str) -> dict[str, Any]:
    """Return the table that a part of a path names: a key, or the name of one of several tables."""
    if part in here and isinstance(found := here[part], list):
        return {str(one.get("name")): one for one in found if isinstance(one, dict)}
    if part not in here and all(isinstance(one, dict) and one.get("name") for one in here.values()) and here:
        raise UsageError(f"{path}: {part!r} does not exist{suggest(part, here)}")
    below = here.setdefault(part, {})
    if not isinstance(below, dict):
        raise UsageError(f"{path}: {part} is a single value, without parts: give the path of a table")
    return below


def _leave_out(table: dict[str, Any], name: str, path: str) -> None:
    """Remove the table of a path such as `sink.index`."""
    kind, _, own = name.partition(".")
    found = table.get(kind)
    names = (
        [str(one.get("name")) for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    )
    if own not in names:
        raise UsageError(f"{path}: {name!r} does not exist{suggest(own, names)}; give one as sink.NAME")
    assert isinstance(found, list)
    table[kind] = [one for one in found if one.get("name") != own]
    if not table[kind] and kind in ("source", "sink"):
        raise UsageError(f"{path}: without {name!r} no {kind} is left: leave at least one in")
