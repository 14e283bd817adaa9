"""Runs one benchmark by name: `./run bench NAME [arguments]` calls `main()` of benchmarks/NAME.py.

It has no list of benchmarks: a benchmark exists when its file does.
"""

from __future__ import annotations

import ast
import signal
import sys
from importlib import import_module
from pathlib import Path
from types import FrameType

from benchmarks._processes import interrupt

_INTERRUPTED, _TERMINATED = (128 + signum for signum in (signal.SIGINT, signal.SIGTERM))


def main(arguments: list[str]) -> int:
    """Run benchmarks/NAME.py with the arguments after its name; return the exit status."""
    names = benchmark_names(Path(__file__).parent)
    if arguments and arguments[0] in ("-h", "--help"):
        print(format_usage(names))
        return 0
    if not arguments:
        print(format_usage(names), file=sys.stderr)
        return 2
    if arguments[0] not in names:
        known = ", ".join(names) or "none"
        print(f"./run bench: no benchmark '{arguments[0]}'; there are: {known}", file=sys.stderr)
        return 2
    return _run(arguments[0], arguments[1:])


def _run(name: str, arguments: list[str]) -> int:
    status = _INTERRUPTED

    def terminate(_number: int, frame: FrameType | None) -> None:
        nonlocal status
        status = _TERMINATED
        interrupt(frame)

    # On either signal the benchmark ends the processes that it started before it ends itself.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, terminate)
    sys.argv = [f"./run bench {name}", *arguments]
    try:
        # The benchmark is imported under its module name, so that its processes can unpickle its functions.
        return int(import_module(f"benchmarks.{name}").main())
    except KeyboardInterrupt:
        if status == _INTERRUPTED:  # the sender of SIGTERM needs no message
            print(f"./run bench {name}: interrupted", file=sys.stderr)
        return status


def benchmark_names(folder: Path) -> list[str]:
    """Return the names of the benchmarks in a folder; a leading underscore marks a helper."""
    return sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))


def format_usage(names: list[str]) -> str:
    """Return the usage text: the command, and one line for each benchmark."""
    lines = ["usage: ./run bench NAME [arguments]", ""]
    for name in names:
        tree = ast.parse((Path(__file__).parent / f"{name}.py").read_text())
        lines.append(f"  {name:12} {(ast.get_docstring(tree) or '').partition(chr(10))[0]}")
    return "\n".join(
        [*lines, "", "./run bench NAME --help lists its arguments and the meaning of its exit status."]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
