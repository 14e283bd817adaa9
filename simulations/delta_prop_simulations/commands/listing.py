"""`delta-prop simulate list`: prints the shipped scenarios, each with the question that it answers."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace

from delta_prop_simulations import files


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--json", action="store_true", help="names and texts as JSON")


def run(options: Namespace) -> int:
    """Run the plan and return its outcome."""
    from delta_prop_simulations.scenarios.reading import read_setups

    entries = {}
    for name, text in files.read_shipped().items():
        setups = read_setups(text)
        entries[name] = {"about": setups[0].about, "alternatives": [one.name for one in setups]}
    if options.json:
        print(json.dumps(entries, indent=1))
        return 0
    width = max(map(len, entries))
    for name, entry in entries.items():
        print(f"{name:{width}}  {entry['about']}")
        if len(entry["alternatives"]) > 1:
            print(f"{'':{width}}  compares: {', '.join(entry['alternatives'])}")
    return 0
