"""Runs one benchmark by name: `./run bench NAME [arguments]` runs benchmarks/NAME.py as a program.

It knows none of them: a benchmark exists when its file does.
"""

from __future__ import annotations

import runpy
import signal
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Run benchmarks/NAME.py with the arguments behind its name."""
    names = benchmark_names(Path(__file__).parent)
    if not arguments or arguments[0] not in names:
        asked = f"no benchmark '{arguments[0]}'" if arguments else "name a benchmark"
        print(f"./run bench: {asked}; there are: {', '.join(names) or 'none'}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers it has started are stopped
    sys.argv = [f"./run bench {arguments[0]}", *arguments[1:]]
    runpy.run_module(f"benchmarks.{arguments[0]}", run_name="__main__", alter_sys=False)
    return 0


def benchmark_names(folder: Path) -> list[str]:
    """The benchmarks of a folder; a leading underscore marks a helper."""
    return sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
