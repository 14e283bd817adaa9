"""Compares the adaptive rate limit with fixed limits, the depth law and no limit: `./run bench controllers`.

Runs the shipped scenario `controllers` with several seeds. With `--write` the table and two pictures go into
`docs/`. It runs in virtual time, so its numbers are the same on any machine.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks._arguments import Arguments, bounded_float, bounded_int
from delta_prop_simulations.files import read_shipped
from delta_prop_simulations.report.figures import sections
from delta_prop_simulations.report.plot import picture
from delta_prop_simulations.scenarios.reading import read_setups
from delta_prop_simulations.scenarios.result import Alternative, Result
from delta_prop_simulations.scenarios.run import run

SCENARIO, SINK = "controllers", "index"
PICTURES = {f"{SINK}: lag": "controllers-lag.svg", "rate limit": "controllers-rate.svg"}
DOCS = Path(__file__).parent.parent / "docs"
_BEGIN, _END = "<!-- measured -->", "<!-- end of measured -->"


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and write if requested; return the exit status."""
    parser = Arguments("controllers", __doc__, status_1="never")
    parser.option("--seeds", bounded_int(1, 1_000), 5, "runs of each alternative; default: 5")
    parser.option("--duration", bounded_float(1, 3_600), 60.0, "virtual seconds; default: 60")
    parser.add_argument("--write", action="store_true", help="write the table and the pictures to docs/")
    options = parser.parse_args(arguments)
    logging.getLogger("delta_prop").addHandler(logging.NullHandler())  # the table has all results
    results = [_run_seed(seed, options.duration) for seed in range(1, options.seeds + 1)]
    table = "\n".join(_table_lines(results))
    print(table)
    if options.write:
        _write(table, results[0])
    return 0


def _run_seed(seed: int, duration_s: float) -> Result:
    setups = read_setups(read_shipped()[SCENARIO], seed=seed, duration=duration_s)
    alternatives: list[Alternative] = []
    for setup in setups:
        print(f"seed {seed}: {setup.name}", file=sys.stderr)
        alternatives.append(run(setup))
    scenario = setups[0].scenario
    return Result(scenario.name, scenario.about, seed, duration_s, alternatives)


def _table_lines(results: Sequence[Result]) -> list[str]:
    """Return the table's lines: medians over the seeds, with the lowest and the highest value."""
    names = [alternative.name for alternative in results[0].alternatives]
    lines = [
        "| pace | deltas applied within 1 s of their offset, per second "
        f"(lowest, highest of {len(results)} seeds) | lag p50, s | lag p99, s | refused "
        "| peak memory, MiB | promises |",
        "|---|---|---|---|---|---|---|",
    ]
    for index, name in enumerate(names):
        alternatives = [result.alternatives[index] for result in results]
        sinks = [next(sink for sink in one.sinks if sink.name == SINK) for one in alternatives]
        within = sorted(sink.within_1s_per_s for sink in sinks)
        broken = sum(verdict.ok is False for one in alternatives for verdict in one.verdicts)
        lines.append(
            f"| {name} | {median(within):,.0f} ({within[0]:,.0f}, {within[-1]:,.0f}) "
            f"| {median(sink.lag.quantiles['p50'] for sink in sinks):.2f} "
            f"| {median(sink.lag.quantiles['p99'] for sink in sinks):.2f} "
            f"| {median(one.totals['refused'] for one in alternatives):,.0f} "
            f"| {median(one.totals['memory_peak_bytes'] for one in alternatives) / 2**20:.1f} "
            f"| {'all kept' if not broken else f'{broken} broken'} |"
        )
    return lines


def _write(table: str, result: Result) -> None:
    page = DOCS / "controllers.md"
    before, _, rest = page.read_text().partition(_BEGIN)
    page.write_text(f"{before}{_BEGIN}\n{table}\n{_END}{rest.partition(_END)[2]}")
    for section in sections(result):
        for plot in section.plots:
            if plot.title in PICTURES:
                (DOCS / PICTURES[plot.title]).write_text(picture(plot))


if __name__ == "__main__":
    sys.exit(main())
