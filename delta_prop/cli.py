"""The command `delta-prop`, one verb a job: parse, call, print.

A user's mistake gets one line that holds the cure and exit status 2, never a traceback. What a verb needs
is imported when it runs, so that help comes at once.
"""

from __future__ import annotations

import argparse
import errno
import io
import shlex
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from delta_prop.commands.operators import add_operator_verbs
from delta_prop.commands.parsers import add_verbs, unused_arguments
from delta_prop.commands.serving import add_server_verbs
from delta_prop.commands.tracing import add_trace_verbs
from delta_prop.spark.command.commands import add_audit_verb, add_spark_verbs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

OK, FAILED, WRONG_USE, INTERRUPTED = 0, 1, 2, 130
PROGRAM = "delta-prop"
VERBS_GROUP = "delta_prop.verbs"
STANDARD_OUTPUT = "standard output"
"""The file that a failure to print names."""
SPOILABLE = ("storage", "index", "cache", "subscriber", "audit", "replica")


class Parser(argparse.ArgumentParser):
    """Tells a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        """Say what was wrong and where help is; exit status 2."""
        if message.endswith("expected one argument"):
            message += " (one that begins with - as OPTION=VALUE)"
        self.exit(WRONG_USE, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")


class Help(argparse.HelpFormatter):
    """Keeps each verb in one line with what it does; left alone, argparse forgets that verbs are indented."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._action_max_length = 14


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; its exit status."""
    if None in (sys.stdin, sys.stdout, sys.stderr):  # closed by the caller
        from delta_prop.commands.edge import open_standard_streams

        open_standard_streams()
    try:
        try:
            status = _run_verb(sys.argv[1:] if arguments is None else list(arguments))
        except SystemExit as end:  # argparse has said it
            status = int(end.code or OK)
        _flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return _reader_gone()
    except Exception as error:
        return _told(error)
    return status


def _run_verb(given: list[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(given)
    unused = unused_arguments(options)
    if unused is not None:
        parser.error(unused)
    options.command = shlex.join([PROGRAM, *given])
    if options.verb != "demo":  # which is for eyes alone, and follows the terminal
        _write_utf8()
    status: int = options.run(options)
    return status


def make_parser() -> Parser:
    """The parser of all verbs."""
    parser = Parser(
        prog=PROGRAM,
        description="Propagates every change of a fact to everything derived from it.",
        epilog="example: delta-prop demo --once",
        allow_abbrev=False,
        formatter_class=Help,
    )
    parser.add_argument("--version", action="store_true", help="print the version and end")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb", parser_class=Parser)
    parser.set_defaults(run=_no_verb)
    _add_demo(verbs)
    add_verbs(verbs, _run)
    add_operator_verbs(verbs, _run)
    add_server_verbs(verbs, _run)
    add_trace_verbs(verbs, _run)
    add_audit_verb(verbs)
    add_spark_verbs(verbs)
    _add_joined_verbs(verbs)
    version = verbs.add_parser("version", help="print the version", epilog="example: delta-prop version")
    version.set_defaults(run=_version)
    return parser


# --- verbs


def _add_joined_verbs(verbs: Any) -> None:
    """Verbs of packages that stand above this one, or beside it: each entry point adds its own."""
    from importlib.metadata import entry_points

    for entry in sorted(entry_points(group=VERBS_GROUP), key=lambda one: one.name):
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
    demo.add_argument(
        "--once", action="store_true", help="end by itself; so it does where there is no terminal"
    )
    demo.add_argument(
        "--path", metavar="DIR", help="your own texts (.py, .md, .rst, .txt); only read, never written"
    )
    demo.add_argument(
        "--spoil", choices=SPOILABLE, help="plant one wrong row there, which the check finds: exit status 1"
    )
    demo.add_argument("--keep", action="store_true", help="keep the temporary folder, and say where it is")
    demo.add_argument("--json", action="store_true", help="print a summary as one JSON line at the end")
    demo.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    from delta_prop.demo.show import Options, show

    def write(text: str) -> None:
        sys.stdout.write(text)
        _flush()

    chosen = Options(
        path=options.path,
        once=options.once,
        spoil=options.spoil,
        json=options.json,
        keep=options.keep,
    )
    return _run(lambda: show(chosen, write))


def _version(_: argparse.Namespace) -> int:
    from importlib.metadata import version

    print(f"delta-prop {version('delta-prop')}")
    return OK


def _no_verb(options: argparse.Namespace) -> int:
    if not options.version:
        make_parser().error("no verb: say what to do, for example demo")
    return _version(options)


# --- running


def _run(function: Callable[[], Awaitable[int]]) -> int:
    """Run a coroutine on uvloop where the extra `fast` has installed it, else on asyncio."""
    import anyio

    return anyio.run(function, backend="asyncio", backend_options={"use_uvloop": _has_uvloop()})


def _write_utf8() -> None:
    """Have standard output take every line: UTF-8 whatever the locale, and what UTF-8 cannot hold (a part of
    a file's name) as the escape that JSON has for it too.
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


def _told(error: Exception) -> int:
    """Each failure in one line; only a defect of ours is worth a traceback."""
    from delta_prop_wire.errors import DeltaPropError, UsageError

    failures = list(_apart(error))
    if not all(isinstance(one, DeltaPropError | OSError) for one in failures):
        raise error
    if any(isinstance(one, OSError) and one.filename == STANDARD_OUTPUT for one in failures):
        _reader_gone()
    for line in dict.fromkeys(map(_line, failures)):
        print(f"delta-prop: {line}", file=sys.stderr)
    return WRONG_USE if all(isinstance(one, UsageError) for one in failures) else FAILED


def _line(failure: Exception) -> str:
    """Return the line for people about a failure: what a file has to do with it, and a cure."""
    if not isinstance(failure, OSError) or not failure.strerror or failure.filename is None:
        return str(failure) or type(failure).__name__
    if failure.filename == STANDARD_OUTPUT and failure.errno == errno.EBADF:
        return f"{STANDARD_OUTPUT} is closed, so nothing was written there: open it, or redirect it to a file"
    if failure.filename == STANDARD_OUTPUT:
        return f"{STANDARD_OUTPUT} cannot be written ({failure.strerror}): make room, or write elsewhere"
    cure = "look what is there, or name another one"
    if isinstance(failure, PermissionError):
        cure = "let the user of this process do so, or name another one"
    return f"{failure.filename!r} cannot be used ({failure.strerror}): {cure}"


def _apart(error: Exception) -> Iterator[Exception]:
    """What a group of failures holds, as tasks raise it; any other failure itself."""
    if isinstance(error, ExceptionGroup):
        for one in error.exceptions:
            yield from _apart(one)
    else:
        yield error


def _reader_gone() -> int:
    from delta_prop.demo.edge import stop_writing

    stop_writing()
    return FAILED
