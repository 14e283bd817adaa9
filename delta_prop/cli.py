"""Command `delta-prop`: parses the arguments of its verbs, runs one, prints its result.

A usage error prints one line with its fix and exits with status 2, never a traceback. Modules that a verb
needs are imported when it runs, so that help prints at once.
"""

from __future__ import annotations

import argparse
import errno
import io
import shlex
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, NoReturn

from delta_prop.commands.operator_parsers import add_operator_verbs
from delta_prop.commands.parsers import add_verbs, find_unused_arguments
from delta_prop.commands.server_parsers import add_server_verbs
from delta_prop.commands.spark_parsers import add_audit_verb, add_spark_verbs

OK, FAILED, USAGE_ERROR, INTERRUPTED = 0, 1, 2, 130
PROGRAM = "delta-prop"
VERBS_GROUP = "delta_prop.verbs"
STANDARD_OUTPUT = "standard output"
"""File name in the error of a failed print."""
CORRUPTIBLE = ("storage", "index", "cache", "subscriber", "audit", "replica")
"""Values of `demo --corrupt`: where it corrupts a row."""


class Parser(argparse.ArgumentParser):
    """Reports a usage error in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error and a pointer to help; exit with status 2."""
        if message.endswith("expected one argument"):
            message += " (an argument that begins with - as OPTION=VALUE)"
        self.exit(USAGE_ERROR, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")


class Help(argparse.HelpFormatter):
    """Puts each verb and its help on one line; plain argparse ignores the indentation of verbs."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._action_max_length = 14


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; return its exit status."""
    if None in (sys.stdin, sys.stdout, sys.stderr):  # closed by the caller
        from delta_prop.platform.system import open_standard_streams

        open_standard_streams()
    try:
        try:
            status = _run_verb(sys.argv[1:] if arguments is None else list(arguments))
        except SystemExit as exit_:  # argparse has printed the message
            status = int(exit_.code or OK)
        _flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return _handle_broken_pipe()
    except Exception as error:
        return _report_error(error)
    return status


def _run_verb(arguments: list[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    unused = find_unused_arguments(options)
    if unused is not None:
        parser.error(unused)
    _require_core()
    options.command = shlex.join([PROGRAM, *arguments])
    if options.verb != "demo":  # the demo prints for people, in the terminal's encoding
        _write_utf8()
    status: int | Coroutine[Any, Any, int] = options.run(options)
    return status if isinstance(status, int) else _run(lambda: status)


def _require_core() -> None:
    """Raise UsageError if the environment names a core that there is not, before anything is done."""
    from delta_prop_wire.core import core_mode

    _ = core_mode.name


def make_parser() -> Parser:
    """Return the parser of all verbs."""
    parser = Parser(
        prog=PROGRAM,
        description="Propagates every change of a fact to everything derived from it.",
        epilog="example: delta-prop demo --once",
        allow_abbrev=False,
        formatter_class=Help,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb", parser_class=Parser)
    parser.set_defaults(run=_run_without_verb)
    _add_demo(verbs)
    add_verbs(verbs)
    add_operator_verbs(verbs)
    add_server_verbs(verbs)
    add_audit_verb(verbs)
    add_spark_verbs(verbs)
    _add_plugin_verbs(verbs)
    version = verbs.add_parser("version", help="print the version", epilog="example: delta-prop version")
    version.set_defaults(run=_print_version)
    return parser


# --- verbs


def _add_plugin_verbs(verbs: Any) -> None:
    """Add the verbs of other packages, by their entry points."""
    from importlib.metadata import entry_points

    for entry in sorted(entry_points(group=VERBS_GROUP), key=lambda entry: entry.name):
        entry.load()(verbs)


def _add_demo(verbs: Any) -> None:
    demo = verbs.add_parser(
        "demo",
        help="search the standard library while you edit it",
        description="Turns real texts into deltas and shows them reach a store, a search index, a cache "
        "and a live listener, in order, each exactly once. Works in a temporary folder; downloads nothing.",
        epilog="examples: delta-prop demo --once | delta-prop demo --path ~/notes",
        allow_abbrev=False,
    )
    demo.add_argument("--once", action="store_true", help="exit when done, as without a terminal")
    demo.add_argument(
        "--path", metavar="DIR", help="folder of your own texts (.py, .md, .rst, .txt), which is only read"
    )
    demo.add_argument(
        "--corrupt",
        choices=CORRUPTIBLE,
        help="corrupt one row there; the check then fails with exit status 1",
    )
    demo.add_argument("--keep", action="store_true", help="keep the temporary folder, and print its path")
    demo.add_argument("--json", action="store_true", help="print a summary as one JSON line at the end")
    demo.set_defaults(run=_run_demo)


def _run_demo(options: argparse.Namespace) -> int:
    from delta_prop.demo.runner import Options, run_demo

    demo_options = Options(
        path=options.path,
        once=options.once,
        corrupt=options.corrupt,
        json=options.json,
        keep=options.keep,
    )
    return _run(lambda: run_demo(demo_options, _FlushedOutput()))


class _FlushedOutput:
    """Standard output, flushed after each write."""

    def write(self, text: str) -> None:
        sys.stdout.write(text)
        _flush()


def _print_version(_: argparse.Namespace) -> int:
    from importlib.metadata import version

    from delta_prop_wire.core import core_mode

    print(f"delta-prop {version('delta-prop')}, {core_mode.name} core")
    return OK


def _run_without_verb(options: argparse.Namespace) -> int:
    if not options.version:
        make_parser().error("no verb: give one, for example demo")
    return _print_version(options)


# --- running


def _run(function: Callable[[], Awaitable[int]]) -> int:
    """Run a coroutine on uvloop if the extra `fast` has installed it, else on asyncio."""
    import anyio

    from delta_prop.platform.system import shorten_switch_interval

    shorten_switch_interval()
    return anyio.run(function, backend="asyncio", backend_options={"use_uvloop": _has_uvloop()})


def _write_utf8() -> None:
    """Set standard output to UTF-8 in every locale; a character that UTF-8 cannot hold (in a file name) is
    printed as its JSON escape.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")


def _flush() -> None:
    try:
        sys.stdout.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, STANDARD_OUTPUT) from None


def _has_uvloop() -> bool:
    try:
        import uvloop  # noqa: F401
    except ImportError:
        return False
    return True


def _report_error(error: Exception) -> int:
    """Print each failure in one line; re-raise an unexpected exception, our defect, with its traceback."""
    from delta_prop_wire.errors import DeltaPropError, UsageError

    failures = list(_flatten_group(error))
    if not all(isinstance(failure, DeltaPropError | OSError) for failure in failures):
        raise error
    if any(isinstance(failure, OSError) and failure.filename == STANDARD_OUTPUT for failure in failures):
        _handle_broken_pipe()
    for line in dict.fromkeys(map(_format_failure, failures)):
        print(f"delta-prop: {line}", file=sys.stderr)
    return USAGE_ERROR if all(isinstance(failure, UsageError) for failure in failures) else FAILED


def _format_failure(failure: Exception) -> str:
    """Return the line that describes a failure: the file concerned, and a fix."""
    if not isinstance(failure, OSError) or not failure.strerror or failure.filename is None:
        return str(failure) or type(failure).__name__
    if failure.filename == STANDARD_OUTPUT and failure.errno == errno.EBADF:
        return f"{STANDARD_OUTPUT} is closed, so nothing was written: open it, or redirect it to a file"
    if failure.filename == STANDARD_OUTPUT:
        return (
            f"{STANDARD_OUTPUT} cannot be written ({failure.strerror}): free disk space, or write elsewhere"
        )
    fix = "check the path, or give another one"
    if isinstance(failure, PermissionError):
        fix = "grant this process's user access, or give another path"
    return f"{failure.filename!r} cannot be used ({failure.strerror}): {fix}"


def _flatten_group(error: Exception) -> Iterator[Exception]:
    """Yield the failures in an exception group, recursively; any other failure itself."""
    if isinstance(error, ExceptionGroup):
        for inner in error.exceptions:
            yield from _flatten_group(inner)
    else:
        yield error


def _handle_broken_pipe() -> int:
    """Discard what is not printed yet, so that the exit does not fail again; return the exit status."""
    from delta_prop.demo.system import discard_output

    discard_output()
    return FAILED
