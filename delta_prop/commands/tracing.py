"""How `trace` is called, which records traffic and looks at recordings. Loads nothing that it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delta_prop.commands.parsers import json_argument, place_arguments, verb_parser

if TYPE_CHECKING:
    from argparse import Namespace

    from delta_prop.commands.parsers import Runner


def add_trace_verbs(verbs: Any, run: Runner) -> None:
    """Add `trace`; `run` runs a coroutine to its end."""
    parser = verb_parser(
        verbs,
        "trace",
        "record when deltas come and how large, without names and content",
        "trace record --from localhost:7373 --to monday.trace --for 10m",
        description="A recording is what `simulate` replays: what would this traffic do to a slower sink?",
    )
    below = parser.add_subparsers(title="verbs", metavar="VERB", dest="trace_verb", required=True)
    _add_record(below, run)
    show = verb_parser(below, "show", "what a recording holds, in numbers", "trace show monday.trace")
    show.add_argument("file", metavar="FILE")
    json_argument(show)
    show.set_defaults(run=_show)


def _add_record(below: Any, run: Runner) -> None:
    parser = verb_parser(
        below,
        "record",
        "write what a log takes, or has taken, into a file",
        "trace record --data facts --to monday.trace --start 2026-01-31T12:00:00Z --for 1h",
        description="Writes times, sizes, operations, priorities, and hashes of names under a salt that is "
        "thrown away. Of a server what comes from now on; of a directory what its log holds.",
    )
    place_arguments(parser, "--from", "a server; several times: addresses of one, tried in turn")
    parser.add_argument("--to", metavar="FILE", required=True, help="a new file")
    parser.add_argument(
        "--start",
        metavar="PLACE",
        help="earliest, latest, an offset, or a time like 2026-01-31T12:00:00Z; without it: of a server "
        "latest, of a directory earliest",
    )
    parser.add_argument(
        "--until",
        metavar="PLACE",
        help="the same; latest is where the log ends now; without it: of a directory latest, of a server "
        "until --for is over, or it is interrupted",
    )
    parser.add_argument(
        "--for", metavar="TIME", dest="span", help="so much of the traffic: 90s, 10m, 2h or 1d"
    )

    def start(options: Namespace) -> int:
        from delta_prop.commands.connecting import link_of
        from delta_prop.commands.traffic import Wanted, record

        place = link_of(options) if options.data is None else options.data
        wanted = Wanted(place, options.to, options.start, options.until, options.span)
        return run(lambda: record(wanted))

    parser.set_defaults(run=start)


def _show(options: Namespace) -> int:
    from delta_prop.commands.traffic_shown import show

    return show(options.file, as_json=options.json)
