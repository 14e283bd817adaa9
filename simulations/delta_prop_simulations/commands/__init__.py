"""The verb `simulate` of the command `delta-prop`, which finds it by an entry point.

Its first argument is one of `KINDS`, or else a scenario: the name of a shipped one, or a TOML file. To keep
help fast, this module does not import what only a run needs.
"""

from __future__ import annotations

from argparse import REMAINDER
from collections.abc import Sequence
from typing import Any

from delta_prop.cli import Help, Parser

KINDS: dict[str, str] = {
    "calibrate": "service times of the shipped sinks on this machine, and the error of predictions",
    "list": "the shipped scenarios",
    "mutants": "tests that the checks find deliberate faults",
    "sweep": "many runs with faults drawn from seeds",
}
"""The kinds of simulation other than a scenario, with short descriptions. For each kind there is a module in
this package with `add_arguments(parser)` and `run(options)`, which returns the exit status.
"""


def add_verbs(verbs: Any) -> None:
    """Add the verb `simulate`."""
    parser = verbs.add_parser(
        "simulate",
        help="try a topology, or thousands of faults, in virtual time",
        description="Runs the production code in virtual time on a fake disk and a fake network. WHAT is a "
        "scenario (a shipped name or a TOML file)"
        + "".join(f", or `{kind}` ({KINDS[kind]})" for kind in KINDS),
        epilog="example: delta-prop simulate storm --report storm.html; each kind has its own --help: "
        "delta-prop simulate WHAT --help",
        allow_abbrev=False,
        formatter_class=Help,
    )
    parser.add_argument("what", metavar="WHAT", help="what to run")
    parser.add_argument("rest", metavar="…", nargs=REMAINDER, help="its options")
    parser.set_defaults(run=lambda options: dispatch(options.what, options.rest))


def dispatch(what: str, rest: Sequence[str]) -> int:
    """Run one kind with its own options; return its exit status."""
    module = _module(what)
    parser = Parser(prog=f"delta-prop simulate {what}", allow_abbrev=False, formatter_class=Help)
    module.add_arguments(parser)
    options = parser.parse_args(rest)
    options.what = what
    status: int = module.run(options)
    return status


def _module(what: str) -> Any:
    """Import the module of a kind: late, so that help is fast, and statically, for tools."""
    if what == "calibrate":
        from delta_prop_simulations.commands import calibrate

        return calibrate
    if what == "list":
        from delta_prop_simulations.commands import listing

        return listing
    if what == "mutants":
        from delta_prop_simulations.commands import mutants

        return mutants
    if what == "sweep":
        from delta_prop_simulations.commands import sweep

        return sweep
    from delta_prop_simulations.commands import scenario

    return scenario
