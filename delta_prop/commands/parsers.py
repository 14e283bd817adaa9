"""How the verbs on a data directory are called. Loads nothing that a verb needs before it runs."""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Awaitable, Callable

    Runner = Callable[[Callable[[], Awaitable[int]]], int]

AT_HELP = "an offset, a time like 2026-01-31T12:00:00Z (UTC, unless it says otherwise), or 1h for an hour ago"
_CONNECTION = ("--token-file", "--tls", "--tls-ca", "--tls-name", "--tls-certificate", "--tls-key")
ACK_LEVELS = ("memory", "logged", "durable")


def add_verbs(verbs: Any, run: Runner) -> None:
    """Add them all; `run` runs a coroutine to its end."""
    _add_publish(verbs, run)
    _add_subscribe(verbs, run)
    _add_log(verbs)
    _add_get(verbs)
    _add_status(verbs, run)


def verb_parser(verbs: Any, name: str, help_: str, example: str, **more: Any) -> ArgumentParser:
    """The parser of one verb."""
    parser: ArgumentParser = verbs.add_parser(
        name, help=help_, epilog=f"example: delta-prop {example}", allow_abbrev=False, **more
    )
    return parser


def data_argument(parser: ArgumentParser) -> None:
    """Which directory."""
    parser.add_argument("--data", metavar="DIR", type=directory, required=True, help="the data directory")


def place_arguments(parser: ArgumentParser, option: str, help_: str, *, required: bool = True) -> None:
    """A data directory, or a server reached by `option`; how to connect to it."""
    places = parser.add_mutually_exclusive_group(required=required)
    places.add_argument("--data", metavar="DIR", type=directory, help="the data directory")
    server_arguments(parser, option, help_, beside=places)
    parser.set_defaults(connects_by=option)


def unused_arguments(options: Namespace) -> str | None:
    """Find an option for connections beside a directory, where nothing connects; None: there is none."""
    option: str | None = getattr(options, "connects_by", None)
    if option is None or options.server is not None:
        return None
    given = [name for name in _CONNECTION if getattr(options, name[2:].replace("-", "_"))]
    if not given:
        return None
    return f"{', '.join(given)}: with --data nothing is connected to: leave that out, or give {option}"


def server_arguments(parser: ArgumentParser, option: str, help_: str, *, beside: Any = None) -> None:
    """A server, and how to connect to it. `beside`: the group of arguments that it is one of."""
    server: dict[str, Any] = {"metavar": "HOST:PORT", "dest": "server", "help": help_}
    if option != "--http":
        server |= {"action": "append"}
    (beside or parser).add_argument(option, **(server if beside else server | {"required": True}))
    connection_arguments(parser)


def connection_arguments(parser: ArgumentParser) -> None:
    """How to connect to a server."""
    how = parser.add_argument_group("connecting")
    how.add_argument("--token-file", metavar="FILE", help="a token; without it that of DELTA_PROP_TOKEN")
    how.add_argument("--tls", action="store_true", help="by TLS, trusting the system's authorities")
    how.add_argument("--tls-ca", metavar="FILE", help="by TLS, trusting these authorities (PEM)")
    how.add_argument("--tls-name", metavar="NAME", help="by TLS; the name in the server's certificate")
    how.add_argument("--tls-certificate", metavar="FILE", help="by TLS, showing this certificate (PEM)")
    how.add_argument("--tls-key", metavar="FILE", help="the certificate's key (PEM)")


def directory(text: str) -> str:
    """A directory's name. An empty one, of a variable that is not set, would be the current directory."""
    if not text:
        raise ArgumentTypeError("the name is empty: name a directory, `.` for the current one")
    return text


def _positive(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r:.40} is not a whole number: give 1 or more") from None
    if count < 1:
        raise ArgumentTypeError(f"{count}: give 1 or more")
    return count


def json_argument(parser: ArgumentParser) -> None:
    """What a program reads."""
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")


def _start(parser: ArgumentParser, otherwise: str) -> None:
    parser.add_argument(
        "--start", metavar="PLACE", help=f"earliest, latest, {AT_HELP}; without it: {otherwise}"
    )


def _count(parser: ArgumentParser, what: str) -> None:
    parser.add_argument("--count", metavar="N", type=_positive, help=f"end after so many {what}")


# --- publish, subscribe


def _add_publish(verbs: Any, run: Runner) -> None:
    parser = verb_parser(
        verbs,
        "publish",
        "put JSON lines into a log, or send them to a server",
        "publish changes.jsonl --to localhost:7373 --producer import-7 --acks",
        description="Reads one delta a line, keeps it, and ends with one JSON line of totals. Exit status 1 "
        "where a line was refused; the others are kept all the same.",
    )
    parser.add_argument(
        "files", metavar="FILE", nargs="*", default=["-"], help="JSON lines; - or none: standard input"
    )
    place_arguments(parser, "--to", "a server; several times: addresses of one, tried in turn")
    parser.add_argument(
        "--producer",
        metavar="NAME",
        help="deltas get the dots (NAME, number of the line, counted through all files), so that the same "
        "lines under the same name have one effect, however often they are sent",
    )
    parser.add_argument(
        "--acks", action="store_true", help="one JSON line for each delta as it is acknowledged or refused"
    )
    parser.add_argument(
        "--ack-level",
        choices=ACK_LEVELS,
        help="what is waited for; default: durable, and of a server the most that it grants",
    )

    def start(options: Namespace) -> int:
        from delta_prop.commands.connecting import link_of
        from delta_prop.commands.publish import Job, publish
        from delta_prop_wire.delta import AckLevel

        level = None if options.ack_level is None else AckLevel[options.ack_level.upper()]
        to = link_of(options) if options.data is None else options.data
        job = Job(options.files, to, options.producer, acks=options.acks, level=level)
        return run(lambda: publish(job))

    parser.set_defaults(run=start)


def _add_subscribe(verbs: Any, run: Runner) -> None:
    parser = verb_parser(
        verbs,
        "subscribe",
        "write a log's deltas as JSON lines, and what comes as it comes",
        "subscribe --from localhost:7373 --topic ns:docs --start earliest --count 10",
        description="Writes each delta with its offset as a JSON line, until it is interrupted. Asks a "
        "server, or reads a directory beside the process that writes it.",
    )
    place_arguments(parser, "--from", "a server; several times: addresses of one, tried in turn")
    parser.add_argument(
        "--topic",
        metavar="T",
        action="append",
        default=[],
        help="*, v:VECTOR_ID, ns:NAMESPACE, op:KIND or c:CUSTOM; several: any of them; default: *",
    )
    _start(parser, "latest, with a new group earliest; a group that is not new goes on where it stopped")
    _count(parser, "lines")
    parser.add_argument(
        "--group",
        metavar="G",
        help="go on where this group stopped; its place is kept beside the log. One member reads at a time, "
        "others stand by",
    )
    parser.add_argument(
        "--no-follow", dest="follow", action="store_false", help="end where the log ends at present"
    )

    def start(options: Namespace) -> int:
        from delta_prop.commands.connecting import link_of
        from delta_prop.commands.subscribe import Wanted, subscribe

        place = link_of(options) if options.data is None else options.data
        wanted = Wanted(
            place, tuple(options.topic), options.start, options.count, options.group, options.follow
        )
        return run(lambda: subscribe(wanted))

    parser.set_defaults(run=start)


# --- log


def _add_log(verbs: Any) -> None:
    parser = verb_parser(
        verbs,
        "log",
        "show, verify, export, restore or migrate what a log holds",
        "log verify --data facts",
        description="All but migrate only read the log, beside a process that writes too.",
    )
    below = parser.add_subparsers(title="verbs", metavar="VERB", dest="log_verb", required=True)
    show = verb_parser(below, "show", "one line a delta: offset, time, dot, what", "log show --data facts")
    data_argument(show)
    _start(show, "earliest")
    _count(show, "deltas")
    json_argument(show)
    show.set_defaults(run=_show)

    verify = verb_parser(
        below, "verify", "read and check everything; 1 if damaged", "log verify --data facts"
    )
    data_argument(verify)
    json_argument(verify)
    verify.set_defaults(run=_verify)

    export = verb_parser(
        below,
        "export",
        "write the log out as JSON lines or frames, or copy the directory",
        "log export --data facts --to backup",
        description="Writes deltas as JSON lines, or frames. With --to it copies the whole log as far as it "
        "is synced, with the cursors beside it, into a directory that opens as a log.",
    )
    data_argument(export)
    _start(export, "earliest")
    _count(export, "deltas")
    export.add_argument("--output", metavar="FILE", help="a new file; without it: standard output")
    export.add_argument(
        "--format", choices=("jsonl", "frames"), default="jsonl", help="default: jsonl; frames: as in the log"
    )
    export.add_argument(
        "--around-damage", action="store_true", help="tell what cannot be read, and go on behind it"
    )
    export.add_argument("--to", metavar="DIR", type=directory, help="copy everything into this new directory")
    export.set_defaults(run=_export)

    restore = verb_parser(
        below,
        "restore",
        "make a data directory of a copy",
        "log restore --from backup --data facts",
        description="Copies what `log export --to` wrote, reads it back, and begins a new epoch at its end.",
    )
    restore.add_argument(
        "--from", metavar="DIR", type=directory, dest="source", required=True, help="the copy"
    )
    data_argument(restore)
    restore.set_defaults(run=_restore)

    migrate = verb_parser(
        below,
        "migrate",
        "bring a data directory to the format of this version",
        "log migrate facts",
        description="Needs room for what it rewrites, and says how much. Broken off at any moment, it leaves "
        "the old directory or one that the same command finishes. Nobody may serve it meanwhile.",
    )
    migrate.add_argument("data", metavar="DIR", type=directory, help="the data directory")
    migrate.add_argument("--json", action="store_true", help="one JSON object instead of a sentence")
    migrate.set_defaults(run=_migrate)


def _show(options: Namespace) -> int:
    from delta_prop.commands.log import Part, show

    return show(Part(options.data, options.start, options.count), as_json=options.json)


def _verify(options: Namespace) -> int:
    from delta_prop.commands.log import verify

    return verify(options.data, as_json=options.json)


def _restore(options: Namespace) -> int:
    from delta_prop.commands.copies import restore

    return restore(options.source, options.data)


def _migrate(options: Namespace) -> int:
    from delta_prop.commands.migrate import migrate

    return migrate(options.data, as_json=options.json)


def _export(options: Namespace) -> int:
    from delta_prop.commands.copies import copy
    from delta_prop.commands.log import Part, export
    from delta_prop_wire.errors import UsageError

    if options.to is not None:
        parts = ("start", "count", "output", "around_damage")
        if options.format != "jsonl" or any(getattr(options, part) for part in parts):
            raise UsageError("--to copies the whole log as it is: leave the other options out")
        return copy(options.data, options.to)
    return export(
        Part(options.data, options.start, options.count),
        output=options.output,
        frames=options.format == "frames",
        around=options.around_damage,
    )


# --- get, status


def _add_get(verbs: Any) -> None:
    parser = verb_parser(
        verbs,
        "get",
        "a vector now, or at a past offset",
        "get doc-1 --namespace docs --at 17 --data facts",
        description="Folds the log's deltas of one vector; one JSON line. Exit status 1 where there is none.",
    )
    parser.add_argument("vector_id", metavar="VECTOR_ID")
    data_argument(parser)
    parser.add_argument(
        "--namespace", metavar="N", help="default: what stands before a colon in the id, else default"
    )
    parser.add_argument(
        "--at", metavar="PLACE", help=f"as of {AT_HELP}; what stands there counts; without it: now"
    )

    def start(options: Namespace) -> int:
        from delta_prop.commands.vector import get

        return get(options.data, options.vector_id, namespace=options.namespace, at=options.at)

    parser.set_defaults(run=start)


def _add_status(verbs: Any, run: Runner) -> None:
    parser = verb_parser(
        verbs,
        "status",
        "the state of a data directory, or of a server",
        "status --data facts --json | delta-prop status --http localhost:7374",
        description="Exit status 1 where a directory is damaged, or a server not ready.",
    )
    place_arguments(parser, "--http", "a server's HTTP port")
    json_argument(parser)

    def start(options: Namespace) -> int:
        if options.data is not None:
            from delta_prop.commands.look import status

            return status(options.data, as_json=options.json)
        from delta_prop.commands.connecting import link_of
        from delta_prop.commands.top import status as status_of

        link = link_of(options)
        return run(lambda: status_of(link, as_json=options.json))

    parser.set_defaults(run=start)
