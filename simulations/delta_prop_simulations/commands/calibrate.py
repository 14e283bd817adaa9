"""`delta-prop simulate calibrate`: measures service times of shipped sinks on this machine, and checks
predictions.

This kind of `simulate` alone depends on the real machine, which should be idle: other programs distort the
times.
"""

from __future__ import annotations

import json
import logging
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from delta_prop.platform import system as terminal
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from delta_prop_simulations.calibration.calibration_file import Calibration

FILE = "calibration.json"
TIME, TIME_COMPARED = "10s", "5s"
ROUNDS_MAX = 100
SECONDS_MIN, SECONDS_MAX = 0.5, 3_600.0


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.epilog = "example: delta-prop simulate calibrate --sinks storage,cache --to calibration.json"
    parser.add_argument("--sinks", metavar="NAMES", help="only these, separated by commas (default: all)")
    parser.add_argument(
        "--for",
        dest="time",
        metavar="TIME",
        help=f"time for each (default: {TIME}; with --compare {TIME_COMPARED})",
    )
    parser.add_argument("--to", metavar="FILE", help=f"write the distributions here (default: {FILE})")
    parser.add_argument(
        "--compare", action="store_true", help="predict set-ups and measure them; writes no distributions"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of --compare (default: 5)")
    parser.add_argument("--seed", type=int, default=1, help="seed of arrivals and predictions (default: 1)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")


def run(options: Namespace) -> int:
    """Calibrate, or compare predictions with measurements; then return 1 if a prediction is off."""
    from delta_prop_simulations.scenarios.reading import parse_duration

    logging.getLogger("delta_prop").addHandler(logging.NullHandler())  # the index paces, as intended
    time = options.time or (TIME_COMPARED if options.compare else TIME)
    seconds = parse_duration(time, "--for")
    if not SECONDS_MIN <= seconds <= SECONDS_MAX:
        raise UsageError(f"--for {time}: give {SECONDS_MIN} s to {SECONDS_MAX / 3_600:g} h")
    if not 1 <= options.rounds <= ROUNDS_MAX:
        raise UsageError(f"--rounds {options.rounds}: give 1 to {ROUNDS_MAX}")
    if options.compare and options.to is not None:
        raise UsageError("--to with --compare: a comparison writes no distributions: leave one out")
    return _compare(options, seconds) if options.compare else _calibrate(options, seconds)


def _calibrate(options: Namespace, seconds: float) -> int:
    from delta_prop_simulations.calibration import system
    from delta_prop_simulations.calibration.calibration_file import Calibration
    from delta_prop_simulations.calibration.catalogue import SINKS, calibrate, select_names
    from delta_prop_simulations.files import write_text
    from delta_prop_simulations.rng import Seed

    path, distributions, bar = options.to or FILE, {}, terminal.Progress()
    try:
        for name in select_names(options.sinks, SINKS):
            bar.report(f"{name}, {seconds:g} s")
            distributions[name] = calibrate(name, Seed(options.seed), seconds)
    finally:
        bar.end()
    calibration = Calibration(system.machine(), distributions)
    write_text(path, calibration.to_text())
    print(calibration.to_text() if options.json else _format_calibration(calibration, path))
    return 0


def _format_calibration(calibration: Calibration, path: str) -> str:
    lines = ["| sink | deltas per call | p50, ms | p99, ms | deltas/s |", "|---|---:|---:|---:|---:|"]
    for name in calibration.sinks:
        distribution = calibration.distribution(name)
        for size in distribution.sizes:
            p50_ms, p99_ms = distribution.quantile(0.5, size) * 1e3, distribution.quantile(0.99, size) * 1e3
            per_s = size / max(distribution.mean(size), 1e-9)
            lines.append(f"| {name} | {size:,} | {p50_ms:.2f} | {p99_ms:.2f} | {per_s:,.0f} |")
    lines.append(
        f'\nWritten to {path}. In a scenario: distribution = "calibrated", file = "{path}", sink = "…".'
    )
    return "\n".join(lines)


def _compare(options: Namespace, seconds: float) -> int:
    from delta_prop_simulations.calibration import system
    from delta_prop_simulations.calibration.catalogue import SET_UPS, compare_all, select_names
    from delta_prop_simulations.calibration.rounds import format_table
    from delta_prop_simulations.rng import Seed

    names, bar = select_names(options.sinks, SET_UPS), terminal.Progress()
    try:
        comparisons = compare_all(names, Seed(options.seed), options.rounds, seconds, bar.report)
    finally:
        bar.end()
    machine = system.machine()
    if options.json:
        print(json.dumps({"machine": machine, "set_ups": [one.to_json() for one in comparisons]}))
    else:
        print(format_table(comparisons, machine))
    return int(not all(one.is_good for one in comparisons))
