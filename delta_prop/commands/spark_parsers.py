"""Argument parsers of `delta-prop spark` and `audit`: they load neither Spark nor the code of the verbs."""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import Any

from delta_prop.commands.parsers import (
    DEFAULT_STREAM,
    TIME_HELP,
    add_connection_arguments,
    add_data_argument,
    add_flag,
    add_json_argument,
    add_option,
    add_partition_arguments,
    add_place_arguments,
    add_source_arguments,
    add_subverbs,
    add_verb_parser,
)

_POSITION_HELP = f"as of an offset, {TIME_HELP}, or 1h for an hour ago; default: now"
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
        _run_spark,
        description="Jobs that outgrow one machine. They need Java 17 and `pip install 'delta-prop[spark]'`.",
    )
    subverbs = add_subverbs(parser, "spark")
    _add_diff(subverbs)
    _add_import(subverbs)
    _add_replay(subverbs)
    _add_rebuild(subverbs)
    _add_stats(subverbs)


def _run_spark(options: Namespace) -> int:
    from delta_prop.commands.spark_verbs import VERBS

    return VERBS[options.spark_verb](options)


def _add_spark_verb(subverbs: Any, name: str, help_: str, example: str, **more: Any) -> ArgumentParser:
    parser = add_verb_parser(subverbs, name, help_, f"spark {example}", **more)
    _add_spark_arguments(parser)
    add_json_argument(parser)
    return parser


def _add_spark_arguments(parser: ArgumentParser) -> None:
    add_option(
        parser,
        "--master",
        "URL",
        "Spark's master; default: all cores of this machine",
        type=_parse_master,
        default=_MASTER,
    )
    add_flag(parser, "--spark-log", "show Spark's log on standard error")


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
    parser.add_argument("--format", choices=("parquet", "csv", "json"), help="default: by the file's name")
    help_ = "the column of ids; default: vector_id"
    add_option(parser, "--key", "COLUMN", help_, type=_parse_name, default="vector_id")
    help_ = "the column of vectors, or several of numbers; default: vector; without one, rows become JSON"
    add_option(parser, "--vector", "COLUMN,…", help_, type=_parse_name, default="vector")
    add_option(parser, "--namespace", "N", "for all rows; default: the column of that name")


def _add_target_arguments(parser: ArgumentParser, outputs: Any) -> None:
    """Add the options of a service to send to; `outputs`: the group that gets `--to`."""
    help_ = "send them to a server; given several times: its addresses, tried in turn"
    add_option(outputs, "--to", "HOST:PORT", help_, dest="server", action="append")
    help_ = "the job's name; a repeated run under it has no further effect"
    add_option(parser, "--producer", "NAME", help_)
    add_connection_arguments(parser)


def _add_output_argument(parser: Any, contents: str) -> None:
    help_ = f"{contents} go to this new file: Parquet if it ends in .parquet, else JSON lines"
    add_option(parser, "--output", "FILE", help_, type=_parse_name)


def _add_deltas_outputs(parser: ArgumentParser) -> None:
    outputs = parser.add_mutually_exclusive_group()
    _add_output_argument(outputs, "deltas")
    _add_target_arguments(parser, outputs)
    help_ = "stream of the server and of the directory; default: default"
    add_option(parser, "--stream", "NAME", help_, default=DEFAULT_STREAM)


# --- audit


def add_audit_verb(verbs: Any) -> None:
    """Add `audit`, which runs on this machine, or with `--spark` on Spark."""
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
    add_option(sinks, "--storage", "FILE", "a storage sink's file, which may be in use", type=_parse_name)
    add_option(
        sinks,
        "--contents",
        "TABLE",
        "contents of another sink, with the columns of a replay: JSON lines, with --spark also Parquet "
        "or CSV; a file, or a folder of them",
    )
    help_ = "next offset of the sink in TABLE; default: the log's end"
    add_option(parser, "--next-offset", "OFFSET", help_, type=int)
    help_ = "the sink's name, to respect its quarantine; default for a file: storage"
    add_option(parser, "--sink", "NAME", help_)
    add_place_arguments(parser)
    add_flag(
        parser,
        "--repair",
        "republish each vector's state in the log, to the server, or without --to to the directory",
    )
    _add_target_arguments(parser, parser)
    _add_output_argument(parser, "differences")
    add_flag(parser, "--spark", "run on Spark, for data that outgrow one machine")
    _add_spark_arguments(parser)
    add_json_argument(parser)
    parser.set_defaults(run=_run_audit)


def _run_audit(options: Namespace) -> int:
    if options.spark:
        if options.stream != DEFAULT_STREAM or options.partition:
            from delta_prop_wire.errors import UsageError

            raise UsageError("--spark: it audits the stream default: leave --spark out for another one")
        from delta_prop.commands.spark_verbs import run_audit

        return run_audit(options)
    if options.spark_log or options.master != _MASTER:
        from delta_prop_wire.errors import UsageError

        raise UsageError("--master, --spark-log: they need --spark: add it")
    from delta_prop.commands.audit import run_audit as run_here

    return run_here(options)


# --- tables


def _add_diff(subverbs: Any) -> None:
    parser = _add_spark_verb(
        subverbs,
        "diff",
        "the deltas that turn one table into another",
        "diff monday.parquet tuesday.parquet --to localhost:7373 --producer tuesday",
        description="Creates, sparse and dense changes (whichever is smaller), deletes and metadata patches. "
        "With --data the old table is the log's present state.",
    )
    add_option(parser, "tables", "OLD NEW", _TABLE_HELP, nargs="+")
    add_data_argument(parser, "a data directory, instead of OLD", required=False)
    _add_table_arguments(parser)
    help_ = "treat numbers that differ by up to X as equal"
    add_option(parser, "--threshold", "X", help_, type=float, default=0.0)
    _add_deltas_outputs(parser)


def _add_import(subverbs: Any) -> None:
    parser = _add_spark_verb(
        subverbs,
        "import",
        "a table's rows as deltas that create them",
        "import documents.parquet --to localhost:7373 --producer documents-1",
    )
    add_option(parser, "table", "TABLE", _TABLE_HELP)
    _add_table_arguments(parser)
    _add_deltas_outputs(parser)


# --- the log


def _add_replay(subverbs: Any) -> None:
    parser = _add_spark_verb(
        subverbs,
        "replay",
        "the state of every vector, now or as of a past position",
        "replay --data facts --at 1000 --output then.parquet",
        description="Reads a directory, also while it is served, or a server whose log is still complete.",
    )
    add_source_arguments(parser, "--from")
    add_partition_arguments(parser)
    add_option(parser, "--at", "POSITION", _POSITION_HELP)
    add_flag(parser, "--alive", "leave deleted vectors out")
    _add_output_argument(parser, "states")


def _add_rebuild(subverbs: Any) -> None:
    parser = _add_spark_verb(
        subverbs,
        "rebuild",
        "create a storage sink's file from the log",
        "rebuild --data facts --storage vectors.db",
        description="The sink opens the file and continues from its cursor. For an index, use "
        "`replay --alive`.",
    )
    add_data_argument(parser)
    add_partition_arguments(parser)
    add_option(parser, "--storage", "FILE", "the file to create", type=_parse_name, required=True)
    add_option(parser, "--at", "POSITION", _POSITION_HELP)
    add_flag(parser, "--replace", "replace the content of an existing file")


def _add_stats(subverbs: Any) -> None:
    example = "stats --data facts --start 2026-01-31"
    parser = _add_spark_verb(subverbs, "stats", "traffic, hot vectors, sparsity, lag", example)
    add_source_arguments(parser, "--from")
    add_partition_arguments(parser)
    add_option(parser, "--start", "POSITION", "earliest (default), an offset or a time")
    add_option(parser, "--until", "POSITION", "latest (default), an offset or a time; exclusive")
    add_option(parser, "--top", "N", "show the N vectors that change most", type=_parse_positive, default=10)
