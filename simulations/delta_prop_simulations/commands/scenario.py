"""`delta-prop simulate SCENARIO`: runs a scenario and its alternatives, and prints the results."""

from __future__ import annotations

import json
import logging
import shlex
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from delta_prop.platform import system
from delta_prop_simulations.files import (
    FilePieces,
    read_shipped,
    read_text,
    resolve_beside,
    resolve_here,
    shipped_names,
    write_text,
)
from delta_prop_wire.errors import DeltaPropError, UsageError

if TYPE_CHECKING:
    from delta_prop.directory.recorded_traffic import RecordedTraffic
    from delta_prop_simulations.scenarios.reading import Setup
    from delta_prop_simulations.scenarios.result import Alternative
    from delta_prop_simulations.scenarios.scenario import SourceSpec

_BAR_CELLS = 24


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.epilog = "example: delta-prop simulate slow_sink --duration 10m --report slow_sink.html"
    parser.add_argument("--seed", type=int, help="seed of all random draws, in place of the scenario's")
    parser.add_argument("--duration", metavar="TIME", help='duration of the load, such as "90s", "10m", "1h"')
    parser.add_argument("--trace", metavar="FILE", help="recorded traffic that all sources replay")
    parser.add_argument("--only", metavar="NAME", help="only this alternative")
    parser.add_argument("--checks", action="store_true", help="check all offsets and bounds at every step")
    parser.add_argument("--report", metavar="FILE", help="write a page with plots to this file")
    parser.add_argument("--json", action="store_true", help="print the full result as JSON")


def run(options: Namespace) -> int:
    """Run the scenario; return 1 if a promise was broken."""
    from delta_prop_simulations.report import format_result, html
    from delta_prop_simulations.scenarios.result import Result

    logging.getLogger("delta_prop").addHandler(logging.NullHandler())  # the result reports problems
    path, setups = _read(options)
    result = Result(
        scenario=setups[0].scenario.name,
        about=setups[0].scenario.about,
        seed=setups[0].scenario.seed,
        duration_s=setups[0].scenario.duration,
        alternatives=[_run_setup(setup, path, checks=options.checks) for setup in setups],
    )
    if options.report is not None:
        write_text(options.report, html(result, _command(options, result.seed)))
    print(
        json.dumps(result.to_json()) if options.json else format_result(result),
        end="\n" if options.json else "",
    )
    return int(any(one.ok is False for each in result.alternatives for one in each.verdicts))


def _read(options: Namespace) -> tuple[str, list[Setup]]:
    """Return the path of the scenario, and the alternatives to run. Raises UsageError."""
    from delta_prop_simulations.scenarios.reading import parse_duration, read_setups

    duration = None if options.duration is None else parse_duration(options.duration, "--duration")
    trace = None if options.trace is None else resolve_here(options.trace)
    path, text = _scenario_text(options.what)
    try:
        setups = read_setups(text, seed=options.seed, duration=duration, trace=trace)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    if options.only is None:
        return path, setups
    selected = [setup for setup in setups if setup.name == options.only]
    if not selected:
        names = ", ".join(repr(setup.name) for setup in setups)
        raise UsageError(f"--only {options.only!r}: unknown alternative of {path}: give one of {names}")
    return path, selected


def _scenario_text(what: str) -> tuple[str, str]:
    names = shipped_names()
    if what in names:
        return what, read_shipped()[what]
    if "/" not in what and not what.endswith(".toml"):
        raise UsageError(f"{what}: unknown scenario: give a TOML file, or one of {', '.join(names)}")
    return what, read_text(what)


def _run_setup(setup: Setup, path: str, *, checks: bool) -> Alternative:
    from delta_prop.directory.recorded_traffic import RecordedTraffic
    from delta_prop_simulations.calibration.calibration_file import distribution_of
    from delta_prop_simulations.chaos.violation import Violation
    from delta_prop_simulations.scenarios.run import RunInputs
    from delta_prop_simulations.scenarios.run import run as run_setup

    progress, started_s, duration_s = system.Progress(), system.now(), setup.scenario.duration

    def report(now_s: float) -> None:
        real_s = max(system.now() - started_s, 1e-9)
        cells = round(_BAR_CELLS * now_s / duration_s)
        bar = "█" * cells + "·" * (_BAR_CELLS - cells)
        speed = f"{now_s / real_s:,.0f} × real time"
        progress.report(f"{setup.name} {bar} {now_s:,.0f} of {duration_s:,.0f} s, {speed}")

    replayed: list[RecordedTraffic] = []

    def traffic(source: SourceSpec) -> RecordedTraffic | None:
        """Return the traffic that a source replays, if any. Each run reads the file anew."""
        if source.trace is None:
            return None
        trace = resolve_beside(path, source.trace)
        replayed.append(RecordedTraffic(FilePieces(trace), trace))
        return replayed[-1]

    inputs = RunInputs(
        distribution_of=lambda sink: distribution_of(sink, path),
        traffic=traffic,
        on_progress=report,
        checks=checks,
    )
    try:
        return run_setup(setup, inputs)
    except Violation as violation:
        command = f"delta-prop simulate {path} --seed {setup.scenario.seed} --checks"
        raise DeltaPropError(f"a check found a violation: {violation}: repeat it with {command}") from None
    finally:
        progress.end()
        for fault in dict.fromkeys(traffic.fault for traffic in replayed if traffic.fault is not None):
            system.note(fault)


def _command(options: Namespace, seed: int) -> str:
    words = ["delta-prop", "simulate", options.what, "--seed", str(seed)]
    for name in ("duration", "trace", "only"):
        value = getattr(options, name)
        words += [] if value is None else [f"--{name}", str(value)]
    return shlex.join([*words, *(["--checks"] if options.checks else [])])
