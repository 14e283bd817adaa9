"""Reads scenarios from TOML. Every error is a UsageError that names the field, the value and the fix."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from delta_prop.api.settings import Settings
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
    Cut,
    Event,
    FaultSpec,
    LinkSpec,
    ReaderSpec,
    Scenario,
    Service,
    SourceSpec,
    Stall,
)
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import UsageError

T = TypeVar("T")

UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
DURATIONS = frozenset(
    {"duration", "start", "stop", "on", "off", "period", "from", "for", "by", "clock_ahead"}
)
"""Keys whose values are times: a number of seconds, or text such as "90s", "1.5m", "1h", "200ms"."""


@dataclass(frozen=True, slots=True)
class Setup:
    """One alternative: its name, its description, and the scenario with the alternative's values."""

    name: str
    about: str
    scenario: Scenario


def read_setups(
    text: str, *, seed: int | None = None, duration: float | None = None, trace: str | None = None
) -> list[Setup]:
    """Return the scenario as written, then its alternatives. `seed` and `duration` override the
    scenario's values.

    `trace`: a file of recorded traffic that every source replays, in place of drawn traffic.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"the scenario is not valid TOML: {error}") from None
    overrides = {"seed": seed, "duration": duration}
    overrides = {key: value for key, value in overrides.items() if value is not None}
    table |= overrides
    if trace is not None:
        _set_trace(table, trace)
    alternatives = _read_alternatives(table.pop("alternative", []))
    scenario = _read_scenario(table)
    if duration is None:  # with an overridden duration, some events may start after the end
        _check_times(scenario)
    setups = [Setup(scenario.base, scenario.about, scenario)]
    for index, alternative in enumerate(alternatives):
        path = f"alternative[{index}]"
        if alternative.name in {setup.name for setup in setups}:
            raise UsageError(f"{path}.name {alternative.name!r}: already used: choose another name")
        changed = _apply_alternative(table, alternative, path) | overrides
        try:
            setups.append(Setup(alternative.name, alternative.about, _read_scenario(changed)))
            if duration is None:
                _check_times(setups[-1].scenario)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None
    return setups


def parse_duration(value: object, path: str) -> float:
    """Return the seconds that `value` is, a number or text with a unit. Raises UsageError."""
    if not isinstance(value, str):
        return float(convert(value, float, path))
    text = value.strip()
    unit = next((unit for unit in ("ms", "s", "m", "h") if text.endswith(unit)), "")
    try:
        return float(text.removesuffix(unit)) * UNITS_S[unit or "s"]
    except ValueError:
        raise value_error(
            path,
            value,
            f'{format_value(value)} is not a duration: give seconds, or "200ms", "90s", "5m", "1h"',
        ) from None


def _set_trace(table: dict[str, Any], trace: str) -> None:
    sources = table.get("source")
    for source in sources if isinstance(sources, list) else []:
        if isinstance(source, dict):
            source |= {"pattern": "replay", "trace": trace}


# --- the tables


def _read_scenario(table: dict[str, Any]) -> Scenario:
    table = deepcopy(table)
    check_keys(table, [field.name for field in fields(Scenario)], "")
    service = _read_service(table.pop("service", {}))
    events: dict[str, tuple[Event, ...]] = {}
    for path, sink_table in _sinks_with_faults(table):
        events[path] = _read_all_timed(Event, _faults_of(sink_table, path), f"{path}.faults")
    links = [_read_link(link, f"link[{index}]") for index, link in enumerate(_take_tables(table, "link"))]
    faults = _read_all_timed(FaultSpec, _take_tables(table, "fault"), "fault")
    readers = [
        _read_reader(reader, f"reader[{index}]") for index, reader in enumerate(_take_tables(table, "reader"))
    ]
    _parse_durations(table, "")
    scenario = build_dataclass(Scenario, table, "")
    sinks = [
        replace(sink, faults=events.get(f"sink[{index}]", ())) for index, sink in enumerate(scenario.sink)
    ]
    _check_levels(scenario.source, service)
    return replace(
        scenario, service=service, sink=tuple(sinks), link=tuple(links), fault=faults, reader=tuple(readers)
    )


def _check_times(scenario: Scenario) -> None:
    """Check that nothing starts after the end, except cuts and stalls. Raises UsageError."""
    starts = {f"source[{index}].start": source.start for index, source in enumerate(scenario.source)}
    starts |= {f"fault[{index}].from": fault.begin for index, fault in enumerate(scenario.fault)}
    starts |= {f"reader[{index}].from": reader.begin for index, reader in enumerate(scenario.reader)}
    for index, sink in enumerate(scenario.sink):
        for number, event in enumerate(sink.faults):
            starts[f"sink[{index}].faults[{number}].from"] = event.begin
    for path, start in starts.items():
        if start >= scenario.duration:
            raise UsageError(f"{path} = {start}: give a time below duration, which is {scenario.duration}")


def _check_levels(sources: tuple[SourceSpec, ...], service: Service) -> None:
    """Check that the log supports the ack levels of the sources. Raises UsageError."""
    for index, source in enumerate(sources):
        level = source.ack_level
        if service.log is None and level not in (None, AckLevel.MEMORY):
            raise UsageError(
                f"source[{index}].ack_level = {level.name.lower()}: a log in memory supports only the level "
                "memory: remove the key, or add [service.log] for a log on disk"
            )


def _take_tables(table: dict[str, Any], name: str) -> list[Any]:
    """Remove a list of tables from a table, and return it; an empty list if there is none."""
    tables = table.pop(name, [])
    if not isinstance(tables, list):
        raise value_error(name, tables, f"write [[{name}]] above each table")
    return tables


def _read_link(table: Any, path: str) -> LinkSpec:
    cuts = _take_tables(table, "cut") if isinstance(table, dict) else []
    link: LinkSpec = convert(table, LinkSpec, path)
    return replace(link, cut=_read_all_timed(Cut, cuts, f"{path}.cut"))


def _read_reader(table: Any, path: str) -> ReaderSpec:
    stalls = _take_tables(table, "stall") if isinstance(table, dict) else []
    reader = _read_timed(ReaderSpec, {"from": 0.0, **table} if isinstance(table, dict) else table, path)
    return replace(reader, stall=_read_all_timed(Stall, stalls, f"{path}.stall"))


def _read_all_timed(kind: type[T], tables: list[Any], path: str) -> tuple[T, ...]:
    return tuple(_read_timed(kind, table, f"{path}[{index}]") for index, table in enumerate(tables))


def timed_keys(kind: type) -> dict[str, str]:
    """Return the keys of a table with a time, with the names of the fields."""
    keys = {"begin": "from", "lasts": "for"}
    return {keys.get(field.name, field.name): field.name for field in fields(kind)}


def _read_timed(kind: type[T], table: Any, path: str) -> T:
    """Read a table with the keys `from` and `for`, which cannot be names of fields in Python."""
    is_event = kind is Event
    if not isinstance(table, dict):
        keys_to_give = "from, for and what" if is_event else "from and for"
        raise value_error(path, table, f"{format_value(table)} is not a table: give {keys_to_give}")
    keys = timed_keys(kind)
    check_keys(table, keys, path)
    for key in ("from", "for", "what") if is_event else ("from",):
        if key not in table:
            raise UsageError(f"{path}.{key}: missing, and without a default: add it")
    _parse_durations(table, path)
    return build_dataclass(kind, {keys[key]: value for key, value in table.items()}, path)


def _read_service(table: Any) -> Service:
    if not isinstance(table, dict):
        raise value_error(
            "service", table, f"{format_value(table)} is not a table: give keys and values below [service]"
        )
    log = table.pop("log", "memory")
    if not isinstance(log, dict) and log != "memory":
        raise value_error(
            "service.log", log, f'{format_value(log)}: give "memory", or a table for a log on disk'
        )
    extra = {"disk_ms_max": table.pop("disk_ms_max")} if "disk_ms_max" in table else {}
    check_keys(table, [*(field.name for field in fields(Settings)), "log", "disk_ms_max"], "service")
    return Service(
        build_dataclass(Settings, table, "service"),
        build_dataclass(LogSettings, log, "service.log") if isinstance(log, dict) else None,
        **{key: convert(value, float, f"service.{key}") for key, value in extra.items()},
    )


def _sinks_with_faults(table: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    sinks = table.get("sink")
    for index, sink in enumerate(sinks if isinstance(sinks, list) else []):
        if isinstance(sink, dict) and "faults" in sink:
            yield f"sink[{index}]", sink


def _faults_of(table: dict[str, Any], path: str) -> list[Any]:
    faults = table.pop("faults")
    if not isinstance(faults, list):
        raise value_error(
            f"{path}.faults",
            faults,
            f'{format_value(faults)}: give a list, as [{{from = "1s", for = "2s", what = "fails"}}]',
        )
    return faults


def _parse_durations(table: Any, path: str) -> None:
    """Replace every duration in a table and the tables in it by its seconds."""
    if isinstance(table, list):
        for index, item in enumerate(table):
            _parse_durations(item, f"{path}[{index}]")
    elif isinstance(table, dict):
        for key, value in table.items():
            if key in DURATIONS:
                table[key] = parse_duration(value, join_path(path, key))
            else:
                _parse_durations(value, join_path(path, key))


# --- alternatives


def _read_alternatives(tables: Any) -> list[AlternativeSpec]:
    if not isinstance(tables, list):
        raise value_error("alternative", tables, "write [[alternative]] above each table")
    alternatives = []
    for index, table in enumerate(tables):
        path = f"alternative[{index}]"
        changes = table.pop("set", {}) if isinstance(table, dict) else {}
        if not isinstance(changes, dict):
            raise value_error(
                f"{path}.set",
                changes,
                f'{format_value(changes)}: give a table, as {{"sink.index.pacing" = true}}',
            )
        spec: AlternativeSpec = convert(table, AlternativeSpec, path)
        alternatives.append(replace(spec, set=changes))
    return alternatives


def _apply_alternative(table: dict[str, Any], spec: AlternativeSpec, path: str) -> dict[str, Any]:
    changed = deepcopy(table)
    for name in spec.without:
        _leave_out(changed, name, f"{path}.without")
    for dotted, value in spec.set.items():
        *parents, last = dotted.split(".")
        parent: Any = changed
        for part in parents:
            parent = _child_table(parent, part, f"{path}.set.{dotted!r}")
        parent[last] = value
    return changed


def _child_table(parent: dict[str, Any], part: str, path: str) -> dict[str, Any]:
    """Return the child for one part of a dotted path; a list of tables is returned as tables by `name`."""
    if part in parent and isinstance(tables := parent[part], list):
        return {str(table.get("name")): table for table in tables if isinstance(table, dict)}
    are_named = all(isinstance(table, dict) and table.get("name") for table in parent.values())
    if part not in parent and are_named and parent:
        raise UsageError(f"{path}: {part!r} does not exist{suggest(part, parent)}")
    child = parent.setdefault(part, {})
    if not isinstance(child, dict):
        raise UsageError(f"{path}: {part} is a single value, not a table: give the path of a table")
    return child


def _leave_out(table: dict[str, Any], name: str, path: str) -> None:
    """Remove the table of a path such as `sink.index`."""
    kind, _, own_name = name.partition(".")
    tables = table.get(kind)
    names = (
        [str(item.get("name")) for item in tables if isinstance(item, dict)]
        if isinstance(tables, list)
        else []
    )
    if own_name not in names:
        raise UsageError(
            f"{path}: {name!r} does not exist{suggest(own_name, names)}; give a path such as sink.NAME"
        )
    assert isinstance(tables, list)
    table[kind] = [item for item in tables if item.get("name") != own_name]
    if not table[kind] and kind in ("source", "sink"):
        raise UsageError(f"{path}: without {name!r} no {kind} is left: keep at least one")
