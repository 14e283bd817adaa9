"""The schema of a results file, field by field; errors name the invalid field. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from benchmarks._measure import Figure
from benchmarks._results import Goal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

FORMAT = 1


def check(results: Mapping[str, Any]) -> None:
    """Raise ValueError if the results have an invalid field; the error names the first one."""
    if results["format"] != FORMAT:
        raise ValueError(f"its format is {results['format']!r}, but this version reads {FORMAT}")
    for name, is_right, expected in _FIELDS:
        if not is_right(results.get(name)):
            raise ValueError(f"{name} is not {expected}")
    for name, figure in results["figures"].items():
        if not _is_figure(figure) or not _has_value(figure, unit=str, less=bool):
            raise ValueError(
                f"figure '{name}' needs the numbers median, low and high, a text unit, a boolean less"
            )
    for index, goal in enumerate(results["goals"]):
        if not _is_goal(goal):
            raise ValueError(
                f"goal {index + 1} needs the texts row, what and unit, a boolean less, a number target, and "
                "moonshot and found, which may be null"
            )
    samples = results["more"].get("memory", [])
    if not _is_list(samples, lambda sample: _is_list(sample, _is_number) and len(sample) == 2):
        raise ValueError("more.memory is not a list of pairs of numbers")


def verdict_of(goal: Mapping[str, Any]) -> str:
    """Return the verdict on a saved goal."""
    fields = {name: goal[name] for name in ("row", "what", "target", "moonshot", "unit", "less")}
    return Goal(**fields).verdict(None if goal["found"] is None else Figure(**goal["found"]))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_list(value: object, is_valid: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(is_valid, value))


def _has_value(value: Mapping[str, Any], **kinds: type) -> bool:
    return all(isinstance(value.get(name), kind) for name, kind in kinds.items())


def _is_figure(value: object) -> bool:
    return isinstance(value, dict) and all(_is_number(value.get(name)) for name in ("median", "low", "high"))


def _is_goal(value: object) -> bool:
    if not isinstance(value, dict) or not _has_value(value, row=str, what=str, unit=str, less=bool):
        return False
    if not _is_number(value.get("target")) or not {"moonshot", "found"} <= value.keys():
        return False
    moonshot, found = value["moonshot"], value["found"]
    is_found_valid = found is None or (_is_figure(found) and len(found) == 3)
    return is_found_valid and (moonshot is None or _is_number(moonshot))


def _fields() -> Iterator[tuple[str, Callable[[Any], bool], str]]:
    yield from ((name, _is_text, "a text") for name in ("bench", "measured_at"))
    yield from ((name, _is_number, "a number") for name in ("calibration_ns", "load"))
    for name in ("tables", "notes", "failures"):
        yield name, lambda value: _is_list(value, _is_text), "a list of texts"
    yield from ((name, _is_object, "an object") for name in ("figures", "more"))
    yield "goals", lambda value: _is_list(value, _is_object), "a list of objects"


_FIELDS = tuple(_fields())
