"""Argument parsers of the verbs on a data directory; load no module that runs them."""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Awaitable, Callable

    Runner = Callable[[Callable[[], Awaitable[int]]], int]

POSITION_HELP = (
    "an offset, a time like 2026-01-31T12:00:00Z (UTC unless it names a zone), or 1h for an hour ago"
)
_CONNECTION_OPTIONS = ("--token-file", "--tls", "--tls-ca", "--tls-name", "--tls-certificate", "--tls-key")
ACK_LEVELS = ("memory", "logged", "durable")


def add_verbs(verbs: Any, run: Runner) -> None:
    """Add the verbs; `run` runs a coroutine to its end."""
    _add_publish(verbs, run)
    _add_subscribe(verbs, run)
    _add_log(verbs)
    _add_get(verbs)
    _add_status(verbs, run)


def add_verb_parser(verbs: Any, name: str, help_: str, example: str, **keywords: Any) -> ArgumentParser:
    """Add and return the parser of one verb."""
    parser: ArgumentParser = verbs.add_parser(
        name, help=help_, epilog=f"example: delta-prop {example}", allow_abbrev=False, **keywords
    )
    return parser


def add_data_argument(parser: ArgumentParser) -> None:
    """Add --data, required."""
    parser.add_argument(
        "--data", metavar="DIR", type=parse_directory, required=True, help="the data directory"
    )


def add_source_arguments(parser: ArgumentParser, option: str, help_: str, *, required: bool = True) -> None:
    """Add --data, or a server as `option` and the options to connect to it."""
    sources = parser.add_mutually_exclusive_group(required=required)
    sources.add_argument("--data", metavar="DIR", type=parse_directory, help="the data directory")
    add_server_arguments(parser, option, help_, group=sources)
    parser.set_defaults(connects_by=option)


def find_unused_arguments(options: Namespace) -> str | None:
    """Return the error message for connection options that --data makes useless; None if there are none."""
    option: str | None = getattr(options, "connects_by", None)
    if option is None or options.server is not None:
        return None
    unused = [name for name in _CONNECTION_OPTIONS if getattr(options, name[2:].replace("-", "_"))]
    if not unused:
        return None
    return f"{', '.join(unused)}: --data connects to nothing: leave them out, or give {option}"


def add_server_arguments(parser: ArgumentParser, option: str, help_: str, *, group: Any = None) -> None:
    """Add a server and the options to connect to it; `group`: the argument group that takes the server."""
    server: dict[str, Any] = {"metavar": "HOST:PORT", "dest": "server", "help": help_}
    if option != "--http":
        server |= {"action": "append"}
    (group or parser).add_argument(option, **(server if group else server | {"required": True}))
    add_connection_arguments(parser)


def add_connection_arguments(parser: ArgumentParser) -> None:
    """Add the options to connect to a server."""
    group = parser.add_argument_group("connecting")
    group.add_argument(
        "--token-file", metavar="FILE", help="file with a token; default: the token in DELTA_PROP_TOKEN"
    )
    group.add_argument("--tls", action="store_true", help="use TLS, trusting the system's authorities")
    group.add_argument("--tls-ca", metavar="FILE", help="use TLS, trusting these authorities (PEM)")
    group.add_argument("--tls-name", metavar="NAME", help="use TLS; the name in the server's certificate")
    group.add_argument("--tls-certificate", metavar="FILE", help="use TLS with this client certificate (PEM)")
    group.add_argument("--tls-key", metavar="FILE", help="the certificate's key (PEM)")


def parse_directory(text: str) -> str:
    """Return a directory's name; refuse an empty one.

    An empty name, e.g. of an unset variable, would mean the current directory.
    """
    if not text:
        raise ArgumentTypeError("the name is empty: name a directory, `.` for the current one")
    return text


def parse_positive(text: str) -> int:
    """Parse an integer of at least 1. Raises ArgumentTypeError."""
    try:
        count = int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r:.40} is not a whole number: give 1 or more") from None
    if count < 1:
        raise ArgumentTypeError(f"{count}: give 1 or more")
    return count


def add_json_argument(parser: ArgumentParser) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")


def _add_start_argument(parser: ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--start", metavar="POSITION", help=f"earliest, latest, {POSITION_HELP}; default: {default}"
    )


def _add_count_argument(parser: ArgumentParser, unit: str) -> None:
    parser.add_argument("--count", metavar="N", type=parse_positive, help=f"end after N {unit}")


# --- publish, subscribe


def _add_publish(verbs: Any, run: Runner) -> None:
    parser = add_verb_parser(
        verbs,
        "publish",
        "append JSON lines to a log, or send them to a server",
        "publish changes.jsonl --to localhost:7373 --producer import-7 --acks",
        description="Reads one delta per line, appends it, and ends with one JSON line of totals. Exit "
        "status 1 if a line was refused; the others are appended all the same.",
    )
    parser.add_argument(
        "files", metavar="FILE", nargs="*", default=["-"], help="JSON lines; - or none: standard input"
    )
    add_source_arguments(parser, "--to", "a server; given several times: its addresses, tried in turn")
    parser.add_argument(
        "--producer",
        metavar="NAME",
        help="identify each delta by NAME and its line number across all files, so that lines sent again "
        "under the same name have no further effect",
    )
    parser.add_argument(
        "--acks", action="store_true", help="one JSON line for each delta as it is acknowledged or refused"
    )
    parser.add_argument(
        "--ack-level",
        choices=ACK_LEVELS,
        help="level to wait for; default: durable; of a server, the highest that it grants",
    )

    def run_verb(options: Namespace) -> int:
        from delta_prop.commands.connect_options import connect_options_of
        from delta_prop.commands.publish import PublishOptions, publish
        from delta_prop_wire.delta import AckLevel

        level = None if options.ack_level is None else AckLevel[options.ack_level.upper()]
        target = connect_options_of(options) if options.data is None else options.data
        publish_options = PublishOptions(
            options.files, target, options.producer, acks=options.acks, level=level
        )
        return run(lambda: publish(publish_options))

    parser.set_defaults(run=run_verb)


def _add_subscribe(verbs: Any, run: Runner) -> None:
    parser = add_verb_parser(
        verbs,
        "subscribe",
        "write a log's deltas as JSON lines, new ones as they come",
        "subscribe --from localhost:7373 --topic ns:docs --start earliest --count 10",
        description="Writes each delta with its offset as a JSON line, until it is interrupted. Asks a "
        "server, or reads a directory, also while a process writes it.",
    )
    add_source_arguments(parser, "--from", "a server; given several times: its addresses, tried in turn")
    parser.add_argument(
        "--topic",
        metavar="T",
        action="append",
        default=[],
        help="*, v:VECTOR_ID, ns:NAMESPACE, op:KIND or c:CUSTOM; repeat to match any of several; default: *",
    )
    _add_start_argument(parser, "latest, for a new group earliest; an existing group ignores it")
    _add_count_argument(parser, "lines")
    parser.add_argument(
        "--group",
        metavar="G",
        help="continue at this group's committed offset, which is stored beside the log. One member reads at "
        "a time, others stand by",
    )
    parser.add_argument(
        "--no-follow", dest="follow", action="store_false", help="stop at the present end of the log"
    )

    def run_verb(options: Namespace) -> int:
        from delta_prop.commands.connect_options import connect_options_of
        from delta_prop.commands.subscribe import SubscribeOptions, subscribe

        source = connect_options_of(options) if options.data is None else options.data
        subscribe_options = SubscribeOptions(
            source, tuple(options.topic), options.start, options.count, options.group, options.follow
        )
        return run(lambda: subscribe(subscribe_options))

    parser.set_defaults(run=run_verb)


# --- log


def _add_log(verbs: Any) -> None:
    parser = add_verb_parser(
        verbs,
        "log",
        "show, verify, export, restore or migrate a log",
        "log verify --data facts",
        description="Every verb but migrate works also while a process writes the log.",
    )
    subverbs = parser.add_subparsers(title="verbs", metavar="VERB", dest="log_verb", required=True)
    show = add_verb_parser(
        subverbs, "show", "one line per delta: offset, time, dot, operation, vector", "log show --data facts"
    )
    add_data_argument(show)
    _add_start_argument(show, "earliest")
    _add_count_argument(show, "deltas")
    add_json_argument(show)
    show.set_defaults(run=_show_log)

    verify = add_verb_parser(
        subverbs, "verify", "read and check all; 1 if corrupted", "log verify --data facts"
    )
    add_data_argument(verify)
    add_json_argument(verify)
    verify.set_defaults(run=_verify_log)

    _add_log_export(subverbs)
    restore = add_verb_parser(
        subverbs,
        "restore",
        "create a data directory from a copy",
        "log restore --from backup --data facts",
        description="Copies what `log export --to` wrote, reads it back, and begins a new epoch at its end.",
    )
    restore.add_argument(
        "--from", metavar="DIR", type=parse_directory, dest="source", required=True, help="the copy"
    )
    add_data_argument(restore)
    restore.set_defaults(run=_restore_log)

    migrate = add_verb_parser(
        subverbs,
        "migrate",
        "bring a data directory to the format of this version",
        "log migrate facts",
        description="Needs free space for the rewritten segments, and reports how much. If interrupted, it "
        "leaves the old directory, or one that the same command finishes. No server may have it open "
        "meanwhile.",
    )
    migrate.add_argument("data", metavar="DIR", type=parse_directory, help="the data directory")
    migrate.add_argument("--json", action="store_true", help="one JSON object instead of a sentence")
    migrate.set_defaults(run=_migrate_log)


def _add_log_export(subverbs: Any) -> None:
    export = add_verb_parser(
        subverbs,
        "export",
        "write the log out as JSON lines or frames, or copy the directory",
        "log export --data facts --to backup",
        description="Writes deltas as JSON lines, or frames. With --to it copies the whole log up to the "
        "recovery point, with the cursors, into a directory that opens as a log.",
    )
    add_data_argument(export)
    _add_start_argument(export, "earliest")
    _add_count_argument(export, "deltas")
    export.add_argument("--output", metavar="FILE", help="a new file; default: standard output")
    export.add_argument(
        "--format", choices=("jsonl", "frames"), default="jsonl", help="default: jsonl; frames: as in the log"
    )
    export.add_argument(
        "--skip-corrupt", action="store_true", help="report corrupted frames, and continue after them"
    )
    export.add_argument(
        "--to", metavar="DIR", type=parse_directory, help="copy everything into this new directory"
    )
    export.set_defaults(run=_export_log)


def _show_log(options: Namespace) -> int:
    from delta_prop.commands.log import LogRange, show

    return show(LogRange(options.data, options.start, options.count), as_json=options.json)


def _verify_log(options: Namespace) -> int:
    from delta_prop.commands.log import verify

    return verify(options.data, as_json=options.json)


def _restore_log(options: Namespace) -> int:
    from delta_prop.commands.backup import restore

    return restore(options.source, options.data)


def _migrate_log(options: Namespace) -> int:
    from delta_prop.commands.migrate import migrate

    return migrate(options.data, as_json=options.json)


def _export_log(options: Namespace) -> int:
    from delta_prop.commands.backup import copy
    from delta_prop.commands.log import LogRange, export
    from delta_prop_wire.errors import UsageError

    if options.to is not None:
        other_options = ("start", "count", "output", "skip_corrupt")
        if options.format != "jsonl" or any(getattr(options, name) for name in other_options):
            raise UsageError("--to copies the whole log as it is: leave the other options out")
        return copy(options.data, options.to)
    return export(
        LogRange(options.data, options.start, options.count),
        output=options.output,
        as_frames=options.format == "frames",
        skip_corrupt=options.skip_corrupt,
    )


# --- get, status


def _add_get(verbs: Any) -> None:
    parser = add_verb_parser(
        verbs,
        "get",
        "a vector now, or as of a past offset or time",
        "get doc-1 --namespace docs --at 17 --data facts",
        description="Folds the log's deltas of one vector; one JSON line. Exit status 1 if it is not alive.",
    )
    parser.add_argument("vector_id", metavar="VECTOR_ID")
    add_data_argument(parser)
    parser.add_argument(
        "--namespace", metavar="N", help="default: the id's part before a colon, else default"
    )
    parser.add_argument("--at", metavar="POSITION", help=f"as of {POSITION_HELP}, inclusive; default: now")

    def run_verb(options: Namespace) -> int:
        from delta_prop.commands.vector import show_vector

        return show_vector(options.data, options.vector_id, namespace=options.namespace, at=options.at)

    parser.set_defaults(run=run_verb)


def _add_status(verbs: Any, run: Runner) -> None:
    parser = add_verb_parser(
        verbs,
        "status",
        "the state of a data directory, or of a server",
        "status --data facts --json | delta-prop status --http localhost:7374",
        description="Exit status 1 if a directory is corrupted, or a server not ready.",
    )
    add_source_arguments(parser, "--http", "a server's HTTP port")
    add_json_argument(parser)

    def run_verb(options: Namespace) -> int:
        if options.data is not None:
            from delta_prop.commands.status import show_status

            return show_status(options.data, as_json=options.json)
        from delta_prop.commands.connect_options import connect_options_of
        from delta_prop.commands.top import show_server_status

        connect_options = connect_options_of(options)
        return run(lambda: show_server_status(connect_options, as_json=options.json))

    parser.set_defaults(run=run_verb)
