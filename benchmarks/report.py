"""Runs the benchmarks, or takes what they wrote, and makes docs/performance.md of it, with its plots.

`./run bench report` runs all of them, about half an hour, and keeps what they write where --keep says;
`--from DIR` takes what is there. Why a goal is short is told by benchmarks/short.toml.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import tomllib
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._arguments import Arguments, kept_directory, writable_file
from benchmarks._bars import Bar, bars
from benchmarks._processes import apart, end
from benchmarks._results import FAR_BEYOND, FAR_SHORT, NOT_MEASURED, REACHED, SHORT, number, spread
from benchmarks._saved import Run, read
from delta_prop.spark.java import missing
from delta_prop_simulations.report.axis import linear
from delta_prop_simulations.report.picture import picture
from delta_prop_simulations.report.plot import Line, Plot

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

BENCHES = (
    *("peers", "pipeline", "stages", "sustained", "mix"),
    *("growth", "memory", "scale", "log", "restart", "spark"),
)
"""In the order of the page."""
ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "performance.md"
GOALS_PLOT, RATES_PLOT, MEMORY_PLOT = (
    "performance-goals.svg",
    "performance-rates.svg",
    "performance-memory.svg",
)
GOAL_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10)
RUN_S_MAX = 3_600


def main(arguments: list[str] | None = None) -> int:
    """Run or read, write the page. Exit status 1 where a benchmark failed."""
    parser = Arguments("report", __doc__, failed="a benchmark failed, or found a goal far short")
    parser.add_argument("--from", dest="source", type=Path, metavar="DIR", help="take what is there")
    parser.add_argument(
        "--keep", type=kept_directory, metavar="DIR", help="keep what the benchmarks write there"
    )
    parser.add_argument("--quick", action="store_true", help="run them all shortly")
    parser.add_argument(
        "--to",
        type=writable_file,
        metavar="FILE",
        default=PAGE,
        help="the page; default: docs/performance.md",
    )
    given = parser.parse_args(arguments)
    failed: list[str] = []
    if given.source is None:
        place = nullcontext(given.keep) if given.keep else tempfile.TemporaryDirectory(prefix="report-")
        with place as folder:
            failed = ran(Path(folder), quick=given.quick)
            run = read([Path(folder)])
    else:
        try:
            run = read([given.source])
        except (OSError, ValueError) as error:
            parser.error(str(error))
    write(run, given.to)
    for name in failed:
        print(f"{name} failed, or found a goal far short", file=sys.stderr)
    return int(bool(failed))


def ran(folder: Path, *, quick: bool) -> list[str]:
    """Run each benchmark in a process of its own; the names of those that failed."""
    failed = []
    for name in BENCHES:
        if name == "spark" and (lacking := missing()) is not None:
            print(f"spark did not run: {lacking}", file=sys.stderr)
            continue
        command = [sys.executable, "-m", "benchmarks", name, "--json", str(folder / f"{name}.json")]
        with apart():
            process = subprocess.Popen([*command, *(["--quick"] if quick else [])])
        try:
            if process.wait(RUN_S_MAX):
                failed.append(name)
        except subprocess.TimeoutExpired:
            print(f"{name} took more than {RUN_S_MAX:,} s", file=sys.stderr)
            failed.append(name)
        finally:
            end(process)
    return failed


def write(run: Run, page: Path, shorts: Sequence[Mapping[str, Any]] | None = None) -> None:
    """The page, and its plots beside it."""
    if shorts is None:
        shorts = tomllib.loads((Path(__file__).parent / "short.toml").read_text()).get("short", [])
    goals = [goal for name in _ordered(run) for goal in run[name]["goals"]]
    plots = drawn(run, goals)
    for name, text in plots.items():
        (page.parent / name).write_text(text)
    page.write_text("\n".join(lines_of(run, goals, shorts, plots)).rstrip() + "\n")


def lines_of(
    run: Run,
    goals: Sequence[Mapping[str, Any]],
    shorts: Sequence[Mapping[str, Any]],
    plots: Iterable[str],
) -> list[str]:
    """The page, line by line."""
    verdicts = [goal["verdict"] for goal in goals]
    reached = sum(one in (REACHED, FAR_BEYOND) for one in verdicts)
    measured_at = max(told["measured_at"] for told in run.values())
    calibrations = [told["calibration_ns"] for told in run.values()]
    loads = [told["load"] for told in run.values()]
    lines = [
        "# Performance",
        "",
        "What was measured, beside the peers and the limits of the same machine in the same run. "
        "`./run bench report` writes this page; `./run bench compare OLD NEW` holds two runs against "
        "each other.",
        "",
        f"- Measured on {measured_at}, on {machine()}.",
        f"- A turn of an empty loop took {min(calibrations):.0f} to {max(calibrations):.0f} ns of CPU; "
        f"the load when benchmarks began was {min(loads):.1f} to {max(loads):.1f}. The machine is shared, "
        "so ratios within a run say more than any figure alone.",
        "- A figure is the median of its rounds, with the lowest and the highest behind it.",
        f"- {len(goals)} goals: {reached} reached, {verdicts.count(FAR_BEYOND)} of these far beyond; "
        f"{sum(one in (SHORT, FAR_SHORT) for one in verdicts)} [short](#short); "
        f"{verdicts.count(NOT_MEASURED)} {NOT_MEASURED}.",
        "",
        "## Goals",
        "",
        *([f"![How far each goal is reached]({GOALS_PLOT})", ""] if GOALS_PLOT in plots else []),
        "| row | what | target | far beyond | found | |",
        "|---|---|---:|---:|---:|---|",
        *map(_goal_line, goals),
        "",
        "## Short",
        "",
        *_short_lines(goals, shorts),
        "## Figures",
        "",
        *([f"![Deltas a second]({RATES_PLOT})", ""] if RATES_PLOT in plots else []),
        *([f"![Memory under a sustained load]({MEMORY_PLOT})", ""] if MEMORY_PLOT in plots else []),
    ]
    for name in _ordered(run):
        lines += [f"### {name.capitalize()}", "", f"`./run bench {name}`", ""]
        for text in run[name]["tables"]:
            lines += ["```text", text.rstrip(), "```", ""]
        lines += [*(f"- {note}" for note in run[name]["notes"]), ""]
        lines += [f"**Failed**: {failure}" for failure in run[name]["failures"]]
    return lines


def machine() -> str:
    """In words that tell nobody which machine it was."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{os.cpu_count()} shared cores ({platform.machine()}), {memory_gib:.0f} GiB, {platform.system()}, "
        f"Python {platform.python_version()}"
    )


def _ordered(run: Run) -> list[str]:
    return [*(name for name in BENCHES if name in run), *sorted(run.keys() - set(BENCHES))]


def _goal_line(goal: Mapping[str, Any]) -> str:
    bound = "≤" if goal["less"] else "≥"
    wanted, moon = (
        "" if goal[one] is None else f"{bound} {number(goal[one])} {goal['unit']}"
        for one in ("target", "moonshot")
    )
    found = spread(goal["found"])
    return f"| {goal['row']} | {goal['what']} | {wanted} | {moon} | {found} | {goal['verdict']} |"


def _short_lines(goals: Sequence[Mapping[str, Any]], shorts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Goals that the same was tried for stand together, before that."""
    together: dict[tuple[int, ...], list[str]] = {}
    for goal in goals:
        if goal["verdict"] not in (SHORT, FAR_SHORT):
            continue
        bound = "at most" if goal["less"] else "at least"
        why = tuple(at for at, short in enumerate(shorts) if _is_why(short, goal))
        together.setdefault(why, []).append(
            f"**{goal['what']}**: {spread(goal['found'])} {goal['unit']}, "
            f"wanted {bound} {number(goal['target'])} {goal['unit']}."
        )
    lines: list[str] = []
    for why, told in together.items():
        for line in told:
            lines += [line, ""]
        for short in (shorts[at] for at in why):
            lines += [*(f"- Tried: {idea}" for idea in short["ideas"]), f"- Limit: {short['limit']}", ""]
    return lines or ["Nothing.", ""]


def _is_why(short: Mapping[str, Any], goal: Mapping[str, Any]) -> bool:
    return goal["row"] in short["rows"] and short.get("what", "") in goal["what"]


# --- plots


def drawn(run: Run, goals: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The plots that there are figures for, by file."""
    plots = {}
    reached = [_reached(goal) for goal in goals if goal["found"] is not None and goal["found"]["median"] > 0]
    if reached:
        title = "How far each goal is reached: 1 is the target"
        plots[GOALS_PLOT] = bars(title, reached, GOAL_TICKS, logarithmic=True)
    rates = [
        Bar(name, figure["median"] / 1e3, f"{figure['median'] / 1e3:,.0f}", 0 if ": ours" in name else 1)
        for name, figure in run.get("peers", {"figures": {}})["figures"].items()
        if figure["unit"] == "deltas/s"
    ]
    if rates:
        ticks = [tick for tick, _ in linear(max(rate.value for rate in rates), "").ticks]
        plots[RATES_PLOT] = bars("Thousands of deltas a second, by scene and server", rates, ticks)
    samples = run.get("sustained", {"more": {}})["more"].get("memory")
    if samples:
        ats, held = ([float(one[place]) for one in samples] for place in (0, 1))
        line = Line("server", 0, ats, held)
        plot = Plot("Memory, MB", linear(max(ats), "s", tight=True), linear(max(held), ""), (line,))
        plots[MEMORY_PLOT] = picture(plot)
    return plots


def _reached(goal: Mapping[str, Any]) -> Bar:
    found, target = goal["found"]["median"], goal["target"]
    value = target / found if goal["less"] else found / target
    row = f"{goal['row']}  " if goal["row"] else ""
    return Bar(f"{row}{_cut(goal['what'])}", value, number(value), 2 if value >= 1 else 1)


def _cut(text: str, characters_max: int = 56) -> str:
    return text if len(text) <= characters_max else f"{text[: characters_max - 1]}…"


if __name__ == "__main__":
    sys.exit(main())
