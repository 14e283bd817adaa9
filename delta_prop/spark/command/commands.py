"""How the verbs of `delta-prop spark` are called. Loads nothing that they need, Spark least of all."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from typing import TYPE_CHECKING, Any

from delta_prop.commands.parsers import (
    connection_arguments,
    data_argument,
    directory,
    json_argument,
    place_arguments,
    verb_parser,
)

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable

_AT_HELP = "as of an offset, a time like 2026-01-31T12:00:00Z, or 1h for an hour ago; default: now"
_MASTERS = r"local(\[(\d+|\*)(,\d+)?\])?|local-cluster\[[\d,]+\]|yarn|(spark|k8s)://.+"
_TABLE_HELP = "Parquet, CSV or JSON lines; a file, or a folder of them"


def add_spark_verbs(verbs: Any) -> None:
    """Add them all."""
    parser = verb_parser(
        verbs,
        "spark",
        "jobs on Spark: compare tables, replay, rebuild, audit",
        "spark replay --data facts --output facts.parquet",
        description="What outgrows one machine. Needs Java 17 and `pip install 'delta-prop[spark]'`.",
    )
    below = parser.add_subparsers(title="verbs", metavar="VERB", dest="spark_verb", required=True)
    _add_diff(below)
    _add_import(below)
    _add_replay(below)
    _add_rebuild(below)
    _add_audit(below)
    _add_stats(below)


def _verb(
    below: Any, name: str, help_: str, example: str, run: Callable[[Namespace], int], **more: Any
) -> ArgumentParser:
    parser = verb_parser(below, name, help_, f"spark {example}", **more)
    parser.add_argument(
        "--master",
        metavar="URL",
        type=_master,
        default="local[*,3]",
        help="Spark's; default: all cores of this machine",
    )
    parser.add_argument("--spark-log", action="store_true", help="show on standard error what Spark logs")
    json_argument(parser)
    parser.set_defaults(run=run)
    return parser


def _master(text: str) -> str:
    """The address of a Spark, as far as its form goes: a wrong one costs Spark's start, and a long trace."""
    if re.fullmatch(_MASTERS, text) is None:
        raise ArgumentTypeError(
            f"{text!r:.80} is no Spark: give local[*], local[4], spark://HOST:PORT, yarn or k8s://…"
        )
    return text


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):
        raise ArgumentTypeError(f"{text!r:.40}: give a whole number, 1 or more")
    return int(text)


def _name(text: str) -> str:
    if not text:
        raise ArgumentTypeError("the name is empty: give one")
    return text


def _table_arguments(parser: ArgumentParser) -> None:
    """How a table is read."""
    parser.add_argument("--format", choices=("parquet", "csv", "json"), help="default: by the file's name")
    parser.add_argument(
        "--key", metavar="COLUMN", type=_name, default="vector_id", help="what tells facts apart"
    )
    parser.add_argument(
        "--vector",
        metavar="COLUMN,…",
        type=_name,
        default="vector",
        help="the column of vectors, or several of numbers; default: vector; without it rows go as JSON",
    )
    parser.add_argument("--namespace", metavar="N", help="of all facts; default: the column of that name")


def _to_arguments(parser: ArgumentParser, places: Any) -> None:
    """A service to send to."""
    places.add_argument(
        "--to",
        metavar="HOST:PORT",
        dest="server",
        action="append",
        help="send them to a server; several times: addresses of one, tried in turn",
    )
    parser.add_argument(
        "--producer", metavar="NAME", help="the job's name: repeated under it, it has one effect"
    )
    connection_arguments(parser)


def _output_argument(parser: Any, what: str) -> None:
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=_name,
        help=f"{what} go to this new file: Parquet where it ends so, else JSON lines",
    )


# --- tables


def _add_diff(below: Any) -> None:
    def start(options: Namespace) -> int:
        from delta_prop.spark.command.verbs import run_diff

        return run_diff(options)

    parser = _verb(
        below,
        "diff",
        "the deltas that make one table of another",
        "diff monday.parquet tuesday.parquet --to localhost:7373 --producer tuesday",
        start,
        description="Creates, sparse and dense changes (whichever is smaller), deletes and metadata patches. "
        "With --data the old table is what the log says now.",
    )
    parser.add_argument("tables", metavar="OLD NEW", nargs="+", help=_TABLE_HELP)
    parser.add_argument("--data", metavar="DIR", type=directory, help="in place of OLD: a data directory")
    _table_arguments(parser)
    parser.add_argument(
        "--threshold",
        metavar="X",
        type=float,
        default=0.0,
        help="numbers that differ by no more are the same",
    )
    places = parser.add_mutually_exclusive_group()
    _output_argument(places, "deltas")
    _to_arguments(parser, places)


def _add_import(below: Any) -> None:
    def start(options: Namespace) -> int:
        from delta_prop.spark.command.verbs import run_import

        return run_import(options)

    parser = _verb(
        below,
        "import",
        "a table's rows as deltas that create them",
        "import documents.parquet --to localhost:7373 --producer documents-1",
        start,
    )
    parser.add_argument("table", metavar="TABLE", help=_TABLE_HELP)
    _table_arguments(parser)
    places = parser.add_mutually_exclusive_group()
    _output_argument(places, "deltas")
    _to_arguments(parser, places)


# --- the log


def _add_replay(below: Any) -> None:
    def start(options: Namespace) -> int:
        from delta_prop.spark.command.verbs import run_replay

        return run_replay(options)

    parser = _verb(
        below,
        "replay",
        "the state of every vector, now or at a place in the log",
        "replay --data facts --at 1000 --output then.parquet",
        start,
        description="Reads a directory without a server, also beside one; or what a server still has whole.",
    )
    place_arguments(parser, "--from", "a server; several times: addresses of one, tried in turn")
    parser.add_argument("--at", metavar="PLACE", help=_AT_HELP)
    parser.add_argument("--alive", action="store_true", help="leave out what was deleted")
    _output_argument(parser, "states")


def _add_rebuild(below: Any) -> None:
    def start(options: Namespace) -> int:
        from delta_prop.spark.command.verbs import run_rebuild

        return run_rebuild(options)

    parser = _verb(
        below,
        "rebuild",
        "a storage sink's file, made from the log",
        "rebuild --data facts --storage vectors.db",
        start,
        description="The sink opens it and goes on from its cursor. For an index: `replay --alive`.",
    )
    data_argument(parser)
    parser.add_argument("--storage", metavar="FILE", type=_name, required=True, help="the file to make")
    parser.add_argument("--at", metavar="PLACE", help=_AT_HELP)
    parser.add_argument("--replace", action="store_true", help="a file that is there loses what it holds")


def _add_audit(below: Any) -> None:
    def start(options: Namespace) -> int:
        from delta_prop.spark.command.verbs import run_audit

        return run_audit(options)

    parser = _verb(
        below,
        "audit",
        "where a sink's contents are not what the log says",
        "audit --data facts --storage vectors.db --repair --to localhost:7373",
        start,
        description="Missing, stale, extra and corrupted vectors, each with its reason. Exit status 1 where "
        "there are some, and they were not all repaired.",
    )
    data_argument(parser)
    sinks = parser.add_mutually_exclusive_group(required=True)
    sinks.add_argument(
        "--storage", metavar="FILE", type=_name, help="a storage sink's file, which may be in use"
    )
    sinks.add_argument(
        "--contents",
        metavar="TABLE",
        help=f"what another sink holds, with the columns of a replay: {_TABLE_HELP}",
    )
    parser.add_argument(
        "--come", metavar="OFFSET", type=int, help="behind what TABLE has of the log; default: all"
    )
    parser.add_argument(
        "--sink", metavar="NAME", help="what it is attached as: its quarantine counts; of a file: storage"
    )
    parser.add_argument(
        "--repair",
        action="store_true",
        help="say again, for each, what the log says; to the server, or without --to into the directory",
    )
    _to_arguments(parser, parser)
    _output_argument(parser, "differences")


def _add_stats(below: Any) -> None:
    def start(options: Namespace) -> int:
        from delta_prop.spark.command.verbs import run_stats

        return run_stats(options)

    parser = _verb(
        below, "stats", "traffic, hot vectors, sparsity, lag", "stats --data facts --start 2026-01-31", start
    )
    place_arguments(parser, "--from", "a server; several times: addresses of one, tried in turn")
    parser.add_argument("--start", metavar="PLACE", help="earliest (default), an offset or a time")
    parser.add_argument(
        "--until", metavar="PLACE", help="latest (default), an offset or a time; left out itself"
    )
    parser.add_argument(
        "--top", metavar="N", type=_positive, default=10, help="so many vectors that change most"
    )
