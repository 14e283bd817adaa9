"""`delta-prop simulate calibrate`: service times of shipped sinks on this machine; predicted beside measured.

The kind of `simulate` that needs the real machine, and a quiet one: what else runs there is measured too.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from delta_prop.commands import edge as terminal
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from delta_prop_simulations.calibration.record import Calibration

FILE = "calibration.json"
TIME, TIME_COMPARED = "10s", "5s"
ROUNDS_MAX = 100
SECONDS_MIN, SECONDS_MAX = 0.5, 3_600.0


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.epilog = "example: delta-prop simulate calibrate --sinks storage,cache --to calibration.json"
    parser.add_argument("--sinks", metavar="NAMES", help="these alone, with commas between (default: all)")
    parser.add_argument(
        "--for",
        dest="time",
        metavar="TIME",
        help=f"for each (default: {TIME}; with --compare {TIME_COMPARED})",
    )
    parser.add_argument("--to", metavar="FILE", help=f"where the laws are written (default: {FILE})")
    parser.add_argument(
        "--compare", action="store_true", help="predict set-ups and measure them; writes no laws"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of --compare (default: 5)")
    parser.add_argument("--seed", type=int, default=1, help="of arrivals and predictions (default: 1)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")


def run(options: Namespace) -> int:
    """Measure. With `--compare` 1 where a prediction is off."""
    from delta_prop_simulations.laboratory.reading import parse_duration

    logging.getLogger("delta_prop").addHandler(logging.NullHandler())  # the index paces: it is meant to
    time = options.time or (TIME_COMPARED if options.compare else TIME)
    seconds = parse_duration(time, "--for")
    if not SECONDS_MIN <= seconds <= SECONDS_MAX:
        raise UsageError(f"--for {time}: give {SECONDS_MIN} s to {SECONDS_MAX / 3_600:g} h")
    if not 1 <= options.rounds <= ROUNDS_MAX:
        raise UsageError(f"--rounds {options.rounds}: give 1 to {ROUNDS_MAX}")
    if options.compare and options.to is not None:
        raise UsageError("--to with --compare: a comparison writes no laws; leave one out")
    return _compare(options, seconds) if options.compare else _calibrate(options, seconds)


def _calibrate(options: Namespace, seconds: float) -> int:
    from delta_prop_simulations.calibration import edge
    from delta_prop_simulations.calibration.catalogue import SINKS, calibrated, chosen
    from delta_prop_simulations.calibration.record import Calibration
    from delta_prop_simulations.chance import Seed
    from delta_prop_simulations.files import write_text

    path, laws, bar = options.to or FILE, {}, terminal.Progress()
    try:
        for name in chosen(options.sinks, SINKS):
            bar.tell(f"{name}, {seconds:g} s")
            laws[name] = calibrated(name, Seed(options.seed), seconds)
    finally:
        bar.end()
    found = Calibration(edge.machine(), laws)
    write_text(path, found.to_text())
    print(found.to_text() if options.json else _told(found, path))
    return 0


def _told(found: Calibration, path: str) -> str:
    lines = ["| sink | deltas a call | p50, ms | p99, ms | deltas/s |", "|---|---:|---:|---:|---:|"]
    for name in found.sinks:
        law = found.law(name)
        for size in law.sizes:
            half, most = law.quantile(0.5, size) * 1e3, law.quantile(0.99, size) * 1e3
            per_s = size / max(law.mean(size), 1e-9)
            lines.append(f"| {name} | {size:,} | {half:.2f} | {most:.2f} | {per_s:,.0f} |")
    lines.append(f'\nWritten to {path}. In a scenario: law = "calibrated", file = "{path}", sink = "…".')
    return "\n".join(lines)


def _compare(options: Namespace, seconds: float) -> int:
    from delta_prop_simulations.calibration import edge
    from delta_prop_simulations.calibration.catalogue import SET_UPS, chosen, compared
    from delta_prop_simulations.calibration.comparison import table
    from delta_prop_simulations.chance import Seed

    names, bar = chosen(options.sinks, SET_UPS), terminal.Progress()
    try:
        comparisons = compared(names, Seed(options.seed), options.rounds, seconds, bar.tell)
    finally:
        bar.end()
    machine = edge.machine()
    if options.json:
        print(json.dumps({"machine": machine, "set_ups": [one.to_json() for one in comparisons]}))
    else:
        print(table(comparisons, machine))
    return int(not all(one.good for one in comparisons))
