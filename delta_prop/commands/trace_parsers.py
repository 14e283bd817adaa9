"""Argument parsers of `trace`, which records and summarizes traffic; load no module that runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delta_prop.commands.parsers import add_json_argument, add_source_arguments, add_verb_parser

if TYPE_CHECKING:
    from argparse import Namespace

    from delta_prop.commands.parsers import Runner


def add_trace_verbs(verbs: Any, run: Runner) -> None:
    """Add `trace`; `run` runs a coroutine to its end."""
    parser = add_verb_parser(
        verbs,
        "trace",
        "record times and sizes of deltas, without names and content",
        "trace record --from localhost:7373 --to monday.trace --for 10m",
        description="`simulate` replays a recording, e.g. to try this traffic on a slower sink.",
    )
    subverbs = parser.add_subparsers(title="verbs", metavar="VERB", dest="trace_verb", required=True)
    _add_record(subverbs, run)
    show = add_verb_parser(subverbs, "show", "summarize a recording", "trace show monday.trace")
    show.add_argument("file", metavar="FILE")
    add_json_argument(show)
    show.set_defaults(run=_show_trace)


def _add_record(subverbs: Any, run: Runner) -> None:
    parser = add_verb_parser(
        subverbs,
        "record",
        "write a log's past or coming traffic to a file",
        "trace record --data facts --to monday.trace --start 2026-01-31T12:00:00Z --for 1h",
        description="Writes times, sizes, operations, priorities, and hashes of names under a salt that is "
        "discarded. Records new deltas of a server, or those in a directory's log.",
    )
    add_source_arguments(parser, "--from", "a server; given several times: its addresses, tried in turn")
    parser.add_argument("--to", metavar="FILE", required=True, help="a new file")
    parser.add_argument(
        "--start",
        metavar="POSITION",
        help="earliest, latest, an offset, or a time like 2026-01-31T12:00:00Z; default: latest for a "
        "server, earliest for a directory",
    )
    parser.add_argument(
        "--until",
        metavar="POSITION",
        help="as for --start; latest is the present end of the log; default: latest for a directory; for a "
        "server, until --for is over or the command is interrupted",
    )
    parser.add_argument(
        "--for", metavar="TIME", dest="span", help="span of the traffic to record: 90s, 10m, 2h or 1d"
    )

    def run_verb(options: Namespace) -> int:
        from delta_prop.commands.connect_options import connect_options_of
        from delta_prop.commands.trace_record import RecordOptions, record

        source = connect_options_of(options) if options.data is None else options.data
        record_options = RecordOptions(source, options.to, options.start, options.until, options.span)
        return run(lambda: record(record_options))

    parser.set_defaults(run=run_verb)


def _show_trace(options: Namespace) -> int:
    from delta_prop.commands.trace_summary import show_trace

    return show_trace(options.file, as_json=options.json)
