"""Runs one benchmark by name: `./run bench NAME [arguments]` calls `main()` of benchmarks/NAME.py.

It knows none of them: a benchmark exists when its file does.
"""

from __future__ import annotations

import ast
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks._processes import interrupt

if TYPE_CHECKING:
    from types import FrameType

_INTERRUPTED, _TERMINATED = (128 + one for one in (signal.SIGINT, signal.SIGTERM))


def main(arguments: list[str]) -> int:
    """Run benchmarks/NAME.py with the arguments behind its name; the exit status."""
    names = benchmark_names(Path(__file__).parent)
    if arguments and arguments[0] in ("-h", "--help"):
        print(told(names))
        return 0
    if not arguments:
        print(told(names), file=sys.stderr)
        return 2
    if arguments[0] not in names:
        there = ", ".join(names) or "none"
        print(f"./run bench: no benchmark '{arguments[0]}'; there are: {there}", file=sys.stderr)
        return 2
    return _run(arguments[0], arguments[1:])


def _run(name: str, arguments: list[str]) -> int:
    status = _INTERRUPTED

    def terminate(_number: int, frame: FrameType | None) -> None:
        nonlocal status
        status = _TERMINATED
        interrupt(frame)

    # Either signal ends what the benchmark has started before the benchmark ends.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, terminate)
    sys.argv = [f"./run bench {name}", *arguments]
    try:
        # Under its own name, so that processes of its own find what it hands them.
        return int(import_module(f"benchmarks.{name}").main())
    except KeyboardInterrupt:
        if status == _INTERRUPTED:  # who ends it by SIGTERM knows
            print(f"./run bench {name}: interrupted", file=sys.stderr)
        return status


def benchmark_names(folder: Path) -> list[str]:
    """The benchmarks of a folder; a leading underscore marks a helper."""
    return sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))


def told(names: list[str]) -> str:
    """How to run one, and what each is."""
    lines = ["usage: ./run bench NAME [arguments]", ""]
    for name in names:
        tree = ast.parse((Path(__file__).parent / f"{name}.py").read_text())
        lines.append(f"  {name:12} {(ast.get_docstring(tree) or '').partition(chr(10))[0]}")
    return "\n".join(
        [*lines, "", "./run bench NAME --help tells its arguments, and what its exit status means."]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
