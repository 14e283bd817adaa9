"""Runs the benchmarks, or reads their results, and writes docs/performance.md with its plots.

`./run bench report` runs all of them, which takes about half an hour, and stores their results in --keep;
`--from DIR` reads results. benchmarks/short.toml says what limits a goal that is short, and what was tried,
which goes into docs/performance-tried.md.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks._arguments import Arguments, created_directory, writable_file
from benchmarks._bars import Bar, bars
from benchmarks._measure import format_number
from benchmarks._processes import end, ignore_interrupts
from benchmarks._results import FAR_BEYOND, FAR_SHORT, NOT_MEASURED, REACHED, SHORT, format_figure
from benchmarks._saved import Run, read
from delta_prop.spark.java import find_missing
from delta_prop_simulations.report.axis import linear_axis
from delta_prop_simulations.report.plot import Line, Plot, picture

BENCHES = (
    *("peers", "pipeline", "stages", "sustained", "mix"),
    *("growth", "memory", "scale", "log", "restart", "spark"),
)
"""Benchmarks in the order of the page."""
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
    """Run or read, write the page. Return 1 if a benchmark failed."""
    parser = Arguments("report", __doc__, status_1="a benchmark failed, or found a goal far short")
    parser.add_argument("--from", dest="source", type=Path, metavar="DIR", help="read the results in DIR")
    parser.option("--keep", created_directory, None, "store the benchmarks' results in DIR", metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="run all of them with --quick")
    parser.option("--to", writable_file, PAGE, "the page; default: docs/performance.md", metavar="FILE")
    given = parser.parse_args(arguments)
    failed: list[str] = []
    if given.source is None:
        output = nullcontext(given.keep) if given.keep else tempfile.TemporaryDirectory(prefix="report-")
        with output as folder:
            failed = run_benchmarks(Path(folder), quick=given.quick)
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


def run_benchmarks(folder: Path, *, quick: bool) -> list[str]:
    """Run each benchmark in a process of its own; return the names of those that failed."""
    failed = []
    for name in BENCHES:
        if name == "spark" and (missing := find_missing()) is not None:
            print(f"spark did not run: {missing}", file=sys.stderr)
            continue
        command = [sys.executable, "-m", "benchmarks", name, "--json", str(folder / f"{name}.json")]
        with ignore_interrupts():
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


def write(run: Run, page: Path, short_goals: Sequence[Mapping[str, Any]] | None = None) -> None:
    """Write the page, its plots and the page of experiments into one folder.

    `short_goals`: the entries of benchmarks/short.toml, if they are not to be read from it.
    """
    if short_goals is None:
        short_goals = tomllib.loads((Path(__file__).parent / "short.toml").read_text()).get("short", [])
    goals = [goal for name in _in_page_order(run) for goal in run[name]["goals"]]
    plots = draw_plots(run, goals)
    for name, text in plots.items():
        (page.parent / name).write_text(text)
    tried = page.with_name(f"{page.stem}-tried.md")
    page.write_text("\n".join(page_lines(run, goals, short_goals, plots, tried.name)).rstrip() + "\n")
    tried.write_text("\n".join(tried_page_lines(short_goals, page.name)).rstrip() + "\n")


def page_lines(
    run: Run,
    goals: Sequence[Mapping[str, Any]],
    short_goals: Sequence[Mapping[str, Any]],
    plots: Iterable[str],
    tried_page: str,
) -> list[str]:
    """Return the lines of the page."""
    verdicts = [goal["verdict"] for goal in goals]
    reached = sum(one in (REACHED, FAR_BEYOND) for one in verdicts)
    measured_at = max(results["measured_at"] for results in run.values())
    calibrations = [results["calibration_ns"] for results in run.values()]
    loads = [results["load"] for results in run.values()]
    lines = [
        "# Performance",
        "",
        "Measurements of this service, of its peers and of the machine's limits, in the same run. "
        f"`./run bench report` writes this page and [Tried]({tried_page}); "
        "`./run bench compare OLD NEW` compares two runs.",
        "",
        "| | |",
        "|---|---|",
        f"| measured | {measured_at} |",
        f"| machine | {machine()} |",
        f"| one turn of an empty loop | {min(calibrations):.0f} to {max(calibrations):.0f} ns of CPU |",
        f"| load when benchmarks began | {min(loads):.1f} to {max(loads):.1f} |",
        "| a figure | median of its rounds (lowest-highest) |",
        f"| goals | {len(goals)}: {reached} reached, {verdicts.count(FAR_BEYOND)} of these far beyond; "
        f"{sum(one in (SHORT, FAR_SHORT) for one in verdicts)} [short](#short); "
        f"{verdicts.count(NOT_MEASURED)} {NOT_MEASURED} |",
        "",
        "Other programs share the machine, so trust ratios within a run more than single figures.",
        "",
        "## Goals",
        "",
        *([f"![How far each goal is reached]({GOALS_PLOT})", ""] if GOALS_PLOT in plots else []),
        "| row | what | target | far beyond | found | |",
        "|---|---|---:|---:|---:|---|",
        *(_goal_line(goal, short_goals) for goal in goals),
        "",
        "## Short",
        "",
        *_short_lines(goals, short_goals, tried_page),
        "## Figures",
        "",
        *([f"![Deltas a second]({RATES_PLOT})", ""] if RATES_PLOT in plots else []),
        *([f"![Memory under a sustained load]({MEMORY_PLOT})", ""] if MEMORY_PLOT in plots else []),
    ]
    for name in _in_page_order(run):
        lines += [f"### {name.capitalize()}", "", f"`./run bench {name}`", ""]
        for text in _blocks(run[name]["tables"]):
            lines += ["```text", text, "```", ""]
        lines += [*(f"- {note}" for note in run[name]["notes"]), ""]
        lines += [f"**Failed**: {failure}" for failure in run[name]["failures"]]
    return lines


def machine() -> str:
    """Describe the machine without identifying it."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{os.cpu_count()} shared cores ({platform.machine()}), {memory_gib:.0f} GiB, {platform.system()}, "
        f"Python {platform.python_version()}"
    )


def _in_page_order(run: Run) -> list[str]:
    return [*(name for name in BENCHES if name in run), *sorted(run.keys() - set(BENCHES))]


def _goal_line(goal: Mapping[str, Any], short_goals: Iterable[Mapping[str, Any]]) -> str:
    """Return a row of the table; the verdict on a short goal links to what limits it."""
    bound = "≤" if goal["less"] else "≥"
    target, moonshot = (
        "" if goal[field] is None else f"{bound} {format_number(goal[field])} {goal['unit']}"
        for field in ("target", "moonshot")
    )
    found = format_figure(goal["found"])
    anchors = [_anchor(short["title"]) for short in short_goals if _explains(short, goal)]
    names = [goal["verdict"], *["more"] * (len(anchors) - 1)]
    links = [f"[{name}](#{anchor})" for name, anchor in zip(names, anchors, strict=bool(anchors))]
    verdict = ", ".join(links) or goal["verdict"]
    return f"| {goal['row']} | {goal['what']} | {target} | {moonshot} | {found} | {verdict} |"


def _blocks(tables: Iterable[str]) -> list[str]:
    """Return the tables as blocks of text; adjacent single lines share a block."""
    blocks: list[str] = []
    was_line = False
    for text in map(str.rstrip, tables):
        is_line = "\n" not in text
        if is_line and was_line:
            blocks[-1] += f"\n{text}"
        else:
            blocks.append(text)
        was_line = is_line
    return blocks


def _short_lines(
    goals: Sequence[Mapping[str, Any]], short_goals: Sequence[Mapping[str, Any]], tried_page: str
) -> list[str]:
    """Return the lines of a section for each entry that explains a short goal."""
    sections = [short for short in short_goals if any(_explains(short, goal) for goal in goals)]
    if not sections:
        return ["Nothing.", ""]
    lines = [
        "What limits the short goals of the table above. Experiments for several goals: "
        f"[Tried]({tried_page}#several-goals).",
        "",
    ]
    for short in sections:
        lines += [f"### {short['title']}", "", *(f"- {fact}" for fact in short["limit"]), ""]
        if short["tried"]:
            lines += [f"[What was tried]({tried_page}#{_anchor(short['title'])})", ""]
    return lines


def tried_page_lines(short_goals: Sequence[Mapping[str, Any]], page: str) -> list[str]:
    """Return the lines of the page of experiments."""
    lines = [
        "# Tried",
        "",
        f"Experiments to make the service faster, by the goals of [Performance]({page}). "
        "Each is listed once. The numbers are those of the experiment's own runs. "
        "`./run bench report` writes this page.",
        "",
        "| verdict | |",
        "|---|---|",
        "| kept | the change is part of the code |",
        "| no effect | no difference beyond the noise |",
        "| rejected | the change is not part of the code |",
        "",
    ]
    for short in short_goals:
        if short["tried"]:
            lines += [f"## {short['title']}", ""]
            if rows := [row for row in short["rows"] if row]:
                lines += [f"Goals: row{'s' * (len(rows) > 1)} {', '.join(rows)}.", ""]
            lines += ["| tried | result | verdict |", "|---|---|---|"]
            lines += [*(f"| {' | '.join(one)} |" for one in short["tried"]), ""]
    return lines


def _anchor(title: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return "".join(char for char in title.lower().replace(" ", "-") if char.isalnum() or char == "-")


def _explains(short: Mapping[str, Any], goal: Mapping[str, Any]) -> bool:
    """Return True if the goal is short, and this entry says what limits it."""
    is_short = goal["verdict"] in (SHORT, FAR_SHORT)
    return is_short and goal["row"] in short["rows"] and short.get("what", "") in goal["what"]


# --- plots


def draw_plots(run: Run, goals: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Draw the plots that have figures; return them by file name."""
    plots = {}
    reached = [_goal_bar(goal) for goal in goals if goal["found"] is not None and goal["found"]["median"] > 0]
    if reached:
        title = "How far each goal is reached: 1 is the target"
        plots[GOALS_PLOT] = bars(title, reached, GOAL_TICKS, logarithmic=True)
    rates = [
        Bar(name, figure["median"] / 1e3, f"{figure['median'] / 1e3:,.0f}", 0 if ": ours" in name else 1)
        for name, figure in run.get("peers", {"figures": {}})["figures"].items()
        if figure["unit"] == "deltas/s"
    ]
    if rates:
        ticks = [tick for tick, _ in linear_axis(max(rate.value for rate in rates), "").ticks]
        plots[RATES_PLOT] = bars("Thousands of deltas a second, by scene and server", rates, ticks)
    samples = run.get("sustained", {"more": {}})["more"].get("memory")
    if samples:
        times_s, memory_mb = ([float(sample[column]) for sample in samples] for column in (0, 1))
        line = Line("server", 0, times_s, memory_mb)
        axes = linear_axis(max(times_s), "s", tight=True), linear_axis(max(memory_mb), "")
        plot = Plot("Memory, MB", *axes, (line,))
        plots[MEMORY_PLOT] = picture(plot)
    return plots


def _goal_bar(goal: Mapping[str, Any]) -> Bar:
    found, target = goal["found"]["median"], goal["target"]
    value = target / found if goal["less"] else found / target
    row = f"{goal['row']}  " if goal["row"] else ""
    return Bar(f"{row}{_shorten(goal['what'])}", value, format_number(value), 2 if value >= 1 else 1)


def _shorten(text: str, characters_max: int = 56) -> str:
    return text if len(text) <= characters_max else f"{text[: characters_max - 1]}…"


if __name__ == "__main__":
    sys.exit(main())
