"""Argument parsers of `delta-prop spark` and `audit`: they load neither Spark nor the code of the verbs."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from typing import TYPE_CHECKING, Any

from delta_prop.commands.parsers import (
    add_connection_arguments,
    add_data_argument,
    add_json_argument,
    add_source_arguments,
    add_verb_parser,
    parse_directory,
)

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable

_POSITION_HELP = "as of an offset, a time like 2026-01-31T12:00:00Z, or 1h for an hour ago; default: now"
_MASTER = "local[*,3]"
_MASTERS = r"local(\[(\d+|\*)(,\d+)?\])?|local-cluster\[[\d,]+\]|yarn|(spark|k8s)://.+"
_TABLE_HELP = "Parquet, CSV or JSON lines; a file, or a folder of them"


def add_spark_verbs(verbs: Any) -> None:
    """Add the verb `spark` with its own verbs."""
    parser = add_verb_parser(
        verbs,
        "spark",
        "jobs on Spark: compare tables, replay, rebuild",
        "spark replay --data facts --output facts.parquet",
        description="Jobs that outgrow one machine. They need Java 17 and `pip install 'delta-prop[spark]'`.",
    )
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", dest="spark_verb", required=True)
    _add_diff(subparsers)
    _add_import(subparsers)
    _add_replay(subparsers)
    _add_rebuild(subparsers)
    _add_stats(subparsers)


def _add_spark_verb(
    subparsers: Any, name: str, help_: str, example: str, run: Callable[[Namespace], int], **more: Any
) -> ArgumentParser:
    parser = add_verb_parser(subparsers, name, help_, f"spark {example}", **more)
    _add_spark_arguments(parser)
    add_json_argument(parser)
    parser.set_defaults(run=run)
    return parser


def _add_spark_arguments(parser: ArgumentParser) -> None:
    """Add the choice of Spark, and of its log output."""
    parser.add_argument(
        "--master",
        metavar="URL",
        type=_parse_master,
        default=_MASTER,
        help="Spark's master; default: all cores of this machine",
    )
    parser.add_argument("--spark-log", action="store_true", help="show Spark's log on standard error")


def _parse_master(text: str) -> str:
    """Return a Spark master; check its syntax, as Spark reports a wrong one late, with a long trace."""
    if re.fullmatch(_MASTERS, text) is None:
        raise ArgumentTypeError(
            f"{text!r:.80} is not a Spark master: give local[*], local[4], spark://HOST:PORT, yarn or k8s://…"
        )
    return text


def _parse_positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):
        raise ArgumentTypeError(f"{text!r:.40}: give a whole number, 1 or more")
    return int(text)


def _parse_name(text: str) -> str:
    if not text:
        raise ArgumentTypeError("the name is empty: give a name")
    return text


def _add_table_arguments(parser: ArgumentParser) -> None:
    """Add the options that describe a table."""
    parser.add_argument("--format", choices=("parquet", "csv", "json"), help="default: by the file's name")
    parser.add_argument(
        "--key",
        metavar="COLUMN",
        type=_parse_name,
        default="vector_id",
        help="the column of ids; default: vector_id",
    )
    parser.add_argument(
        "--vector",
        metavar="COLUMN,…",
        type=_parse_name,
        default="vector",
        help="the column of vectors, or several of numbers; default: vector; without one, rows become JSON",
    )
    parser.add_argument("--namespace", metavar="N", help="for all rows; default: the column of that name")


def _add_target_arguments(parser: ArgumentParser, outputs: Any) -> None:
    """Add the options of a service to send to; `outputs`: the group that gets `--to`."""
    outputs.add_argument(
        "--to",
        metavar="HOST:PORT",
        dest="server",
        action="append",
        help="send them to a server; given several times: its addresses, tried in turn",
    )
    parser.add_argument(
        "--producer", metavar="NAME", help="the job's name; a repeated run under it has no further effect"
    )
    add_connection_arguments(parser)


def _add_output_argument(parser: Any, contents: str) -> None:
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=_parse_name,
        help=f"{contents} go to this new file: Parquet if it ends in .parquet, else JSON lines",
    )


# --- audit


def add_audit_verb(verbs: Any) -> None:
    """Add `audit`, which runs on this machine, or with `--spark` on Spark."""

    def start(options: Namespace) -> int:
        if options.spark:
            from delta_prop.commands.spark_verbs import run_audit

            return run_audit(options)
        if options.spark_log or options.master != _MASTER:
            from delta_prop_wire.errors import UsageError

            raise UsageError("--master, --spark-log: they need --spark: add it")
        from delta_prop.commands.audit import run_audit as run_here

        return run_here(options)

    parser = add_verb_parser(
        verbs,
        "audit",
        "find where a sink's contents differ from the log",
        "audit --data facts --storage vectors.db --repair --to localhost:7373",
        description="Lists missing, stale, extra and corrupted vectors, each with its reason. Exit status 1 "
        "if there are some that were not repaired. Runs here in bounded memory, and spills to a temporary "
        "folder (TMPDIR).",
    )
    add_data_argument(parser)
    sinks = parser.add_mutually_exclusive_group(required=True)
    sinks.add_argument(
        "--storage", metavar="FILE", type=_parse_name, help="a storage sink's file, which may be in use"
    )
    sinks.add_argument(
        "--contents",
        metavar="TABLE",
        help="contents of another sink, with the columns of a replay: JSON lines, with --spark also Parquet "
        "or CSV; a file, or a folder of them",
    )
    parser.add_argument(
        "--next-offset",
        metavar="OFFSET",
        type=int,
        help="next offset of the sink in TABLE; default: the log's end",
    )
    parser.add_argument(
        "--sink",
        metavar="NAME",
        help="the sink's name, to respect its quarantine; default for a file: storage",
    )
    parser.add_argument(
        "--repair",
        action="store_true",
        help="republish each vector's state in the log, to the server, or without --to to the directory",
    )
    _add_target_arguments(parser, parser)
    _add_output_argument(parser, "differences")
    parser.add_argument(
        "--spark", action="store_true", help="run on Spark, for data that outgrow one machine"
    )
    _add_spark_arguments(parser)
    add_json_argument(parser)
    parser.set_defaults(run=start)


# --- tables


def _add_diff(subparsers: Any) -> None:
    def start(options: Namespace) -> int:
        from delta_prop.commands.spark_verbs import run_diff

        return run_diff(options)

    parser = _add_spark_verb(
        subparsers,
        "diff",
        "the deltas that turn one table into another",
        "diff monday.parquet tuesday.parquet --to localhost:7373 --producer tuesday",
        start,
        description="Creates, sparse and dense changes (whichever is smaller), deletes and metadata patches. "
        "With --data the old table is the log's present state.",
    )
    parser.add_argument("tables", metavar="OLD NEW", nargs="+", help=_TABLE_HELP)
    parser.add_argument(
        "--data", metavar="DIR", type=parse_directory, help="a data directory, instead of OLD"
    )
    _add_table_arguments(parser)
    parser.add_argument(
        "--threshold",
        metavar="X",
        type=float,
        default=0.0,
        help="treat numbers that differ by up to X as equal",
    )
    outputs = parser.add_mutually_exclusive_group()
    _add_output_argument(outputs, "deltas")
    _add_target_arguments(parser, outputs)


def _add_import(subparsers: Any) -> None:
    def start(options: Namespace) -> int:
        from delta_prop.commands.spark_verbs import run_import

        return run_import(options)

    parser = _add_spark_verb(
        subparsers,
        "import",
        "a table's rows as deltas that create them",
        "import documents.parquet --to localhost:7373 --producer documents-1",
        start,
    )
    parser.add_argument("table", metavar="TABLE", help=_TABLE_HELP)
    _add_table_arguments(parser)
    outputs = parser.add_mutually_exclusive_group()
    _add_output_argument(outputs, "deltas")
    _add_target_arguments(parser, outputs)


# --- the log


def _add_replay(subparsers: Any) -> None:
    def start(options: Namespace) -> int:
        from delta_prop.commands.spark_verbs import run_replay

        return run_replay(options)

    parser = _add_spark_verb(
        subparsers,
        "replay",
        "the state of every vector, now or as of a past position",
        "replay --data facts --at 1000 --output then.parquet",
        start,
        description="Reads a directory, also while it is served, or a server whose log is still complete.",
    )
    add_source_arguments(parser, "--from", "a server; given several times: its addresses, tried in turn")
    parser.add_argument("--at", metavar="POSITION", help=_POSITION_HELP)
    parser.add_argument("--alive", action="store_true", help="leave deleted vectors out")
    _add_output_argument(parser, "states")


def _add_rebuild(subparsers: Any) -> None:
    def start(options: Namespace) -> int:
        from delta_prop.commands.spark_verbs import run_rebuild

        return run_rebuild(options)

    parser = _add_spark_verb(
        subparsers,
        "rebuild",
        "create a storage sink's file from the log",
        "rebuild --data facts --storage vectors.db",
        start,
        description="The sink opens the file and continues from its cursor. For an index, use "
        "`replay --alive`.",
    )
    add_data_argument(parser)
    parser.add_argument(
        "--storage", metavar="FILE", type=_parse_name, required=True, help="the file to create"
    )
    parser.add_argument("--at", metavar="POSITION", help=_POSITION_HELP)
    parser.add_argument("--replace", action="store_true", help="replace the content of an existing file")


def _add_stats(subparsers: Any) -> None:
    def start(options: Namespace) -> int:
        from delta_prop.commands.spark_verbs import run_stats

        return run_stats(options)

    parser = _add_spark_verb(
        subparsers,
        "stats",
        "traffic, hot vectors, sparsity, lag",
        "stats --data facts --start 2026-01-31",
        start,
    )
    add_source_arguments(parser, "--from", "a server; given several times: its addresses, tried in turn")
    parser.add_argument("--start", metavar="POSITION", help="earliest (default), an offset or a time")
    parser.add_argument(
        "--until", metavar="POSITION", help="latest (default), an offset or a time; exclusive"
    )
    parser.add_argument(
        "--top", metavar="N", type=_parse_positive, default=10, help="show the N vectors that change most"
    )
