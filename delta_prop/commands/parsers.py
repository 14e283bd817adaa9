"""Argument parsers of the verbs on a data directory, and what all parsers share.

They load no module that runs a verb: such a module is imported when its verb runs.
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Runner = Callable[[Namespace], int | Coroutine[Any, Any, int]]

TIME_HELP = "a time like 2026-01-31T12:00:00Z"
POSITION_HELP = f"an offset, {TIME_HELP} (UTC unless it names a zone), or 1h for an hour ago"
DEFAULT_STREAM = "default"
ACK_LEVELS = ("memory", "logged", "durable")
_CONNECTION_OPTIONS = ("--token-file", "--tls", "--tls-ca", "--tls-name", "--tls-certificate", "--tls-key")
_DIGITS_MAX = 100
_SERVERS_HELP = "a server; given several times: its addresses, tried in turn"


# --- what all parsers share


def add_verb_parser(
    verbs: Any, name: str, help_: str, example: str, run: Runner | None = None, **keywords: Any
) -> ArgumentParser:
    """Add and return the parser of one verb; `run` runs it, and the verbs below it that have none."""
    parser: ArgumentParser = verbs.add_parser(
        name, help=help_, epilog=f"example: delta-prop {example}", allow_abbrev=False, **keywords
    )
    if run is not None:
        parser.set_defaults(run=run)
    return parser


def add_subverbs(parser: ArgumentParser, verb: str, *, required: bool = True) -> Any:
    """Let a verb have verbs of its own; return the object to add them to."""
    return parser.add_subparsers(title="verbs", metavar="VERB", dest=f"{verb}_verb", required=required)


def add_option(parser: Any, name: str, metavar: str, help_: str, **keywords: Any) -> None:
    """Add an option with a value."""
    parser.add_argument(name, metavar=metavar, help=help_, **keywords)


def add_flag(parser: Any, name: str, help_: str) -> None:
    """Add an option without a value."""
    parser.add_argument(name, action="store_true", help=help_)


def add_json_argument(parser: ArgumentParser, help_: str = "JSON lines instead of a table") -> None:
    """Add --json."""
    add_flag(parser, "--json", help_)


def add_data_argument(parser: Any, help_: str = "the data directory", **keywords: Any) -> None:
    """Add --data; it is required unless `keywords` say otherwise."""
    add_option(parser, "--data", "DIR", help_, type=parse_directory, **{"required": True} | keywords)


def add_start_argument(parser: ArgumentParser, default: str, positions: str = POSITION_HELP) -> None:
    """Add --start. `default`, `positions`: texts for its help."""
    add_option(parser, "--start", "POSITION", f"earliest, latest, {positions}; default: {default}")


def add_source_arguments(
    parser: ArgumentParser, option: str, help_: str = _SERVERS_HELP, *, required: bool = True
) -> None:
    """Add --data, or a server as `option` and the options to connect to it."""
    sources = parser.add_mutually_exclusive_group(required=required)
    add_data_argument(sources, required=False)
    add_server_arguments(parser, option, help_, group=sources)
    parser.set_defaults(connects_by=option)


def add_partition_arguments(parser: ArgumentParser) -> None:
    """Add --stream and --partition."""
    add_option(parser, "--stream", "NAME", "default: default", default=DEFAULT_STREAM)
    help_ = "one of the stream's partitions, from 0 on; default: all, or the only one"
    add_option(parser, "--partition", "N", help_, type=parse_count)


def add_place_arguments(parser: ArgumentParser, *, lists: bool = False, prefix: str = "") -> None:
    """Add --stream and --partition of an operators' verb. `lists`: by default it shows all partitions.

    `prefix`: of the names under which the parsed options have the values.
    """
    name_help, number_help = "default: default", "from 0 on; needed if the stream has several"
    if lists:
        name_help, number_help = "only this stream's partitions; default: all", "only this partition"
    default = None if lists or prefix else DEFAULT_STREAM
    add_option(parser, "--stream", "NAME", name_help, dest=f"{prefix}stream", default=default)
    add_option(parser, "--partition", "N", number_help, dest=f"{prefix}partition", type=parse_count)


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
    keywords: dict[str, Any] = {} if option == "--http" else {"action": "append"}
    if group is None:
        keywords["required"] = True
    add_option(group or parser, option, "HOST:PORT", help_, dest="server", **keywords)
    add_connection_arguments(parser)


def add_connection_arguments(parser: ArgumentParser) -> None:
    """Add the options to connect to a server."""
    group = parser.add_argument_group("connecting")
    add_option(group, "--token-file", "FILE", "file with a token; default: the token in DELTA_PROP_TOKEN")
    add_flag(group, "--tls", "use TLS, trusting the system's authorities")
    add_option(group, "--tls-ca", "FILE", "use TLS, trusting these authorities (PEM)")
    add_option(group, "--tls-name", "NAME", "use TLS; the name in the server's certificate")
    add_option(group, "--tls-certificate", "FILE", "use TLS with this client certificate (PEM)")
    add_option(group, "--tls-key", "FILE", "the certificate's key (PEM)")


def parse_directory(text: str) -> str:
    """Return a directory's name; refuse an empty one.

    An empty name, e.g. of an unset variable, would mean the current directory.
    """
    if not text:
        raise ArgumentTypeError("the name is empty: name a directory, `.` for the current one")
    return text


def parse_count(text: str) -> int:
    """Parse an integer of at least 0. Raises ArgumentTypeError."""
    return _parse_integer(text, 0)


def parse_positive(text: str) -> int:
    """Parse an integer of at least 1. Raises ArgumentTypeError."""
    return _parse_integer(text, 1)


def _parse_integer(text: str, minimum: int) -> int:
    """Parse digits; not spaces, underscores or digits of other scripts, as `int` does."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        raise ArgumentTypeError(f"{text!r:.40} is not a whole number: give {minimum} or more")
    if len(digits) > _DIGITS_MAX:
        raise ArgumentTypeError(f"{text!r:.40}… has {len(digits)} digits: give up to {_DIGITS_MAX}")
    number = int(text)
    if number < minimum:
        raise ArgumentTypeError(f"{number}: give {minimum} or more")
    return number


def _add_count_argument(parser: ArgumentParser, unit: str) -> None:
    add_option(parser, "--count", "N", f"end after N {unit}", type=parse_positive)


# --- publish, subscribe, get, status


def add_verbs(verbs: Any) -> None:
    """Add the verbs."""
    _add_publish(verbs)
    _add_subscribe(verbs)
    _add_log(verbs)
    _add_get(verbs)
    status = add_verb_parser(
        verbs,
        "status",
        "the state of a data directory, or of a server",
        "status --data facts --json | delta-prop status --http localhost:7374",
        _run_status,
        description="Exit status 1 if a directory is corrupted, or a server not ready.",
    )
    add_source_arguments(status, "--http", "a server's HTTP port")
    add_place_arguments(status, lists=True)
    add_json_argument(status)


def _add_publish(verbs: Any) -> None:
    parser = add_verb_parser(
        verbs,
        "publish",
        "append JSON lines to a log, or send them to a server",
        "publish changes.jsonl --to localhost:7373 --producer import-7 --acks",
        _run_publish,
        description="Reads one delta per line, appends it, and ends with one JSON line of totals. Exit "
        "status 1 if a line was refused; the others are appended all the same.",
    )
    add_option(parser, "files", "FILE", "JSON lines; - or none: standard input", nargs="*", default=["-"])
    add_source_arguments(parser, "--to")
    add_partition_arguments(parser)
    add_option(
        parser,
        "--producer",
        "NAME",
        "identify each delta by NAME and its line number across all files, so that lines sent again "
        "under the same name have no further effect",
    )
    add_flag(parser, "--acks", "one JSON line for each delta as it is acknowledged or refused")
    parser.add_argument(
        "--ack-level",
        choices=ACK_LEVELS,
        help="level to wait for; default: durable; of a server, the highest that it grants",
    )


def _add_subscribe(verbs: Any) -> None:
    parser = add_verb_parser(
        verbs,
        "subscribe",
        "write a log's deltas as JSON lines, new ones as they come",
        "subscribe --from localhost:7373 --topic ns:docs --start earliest --count 10",
        _run_subscribe,
        description="Writes each delta with its offset as a JSON line, until it is interrupted. Asks a "
        "server, or reads a directory, also while a process writes it.",
    )
    add_source_arguments(parser, "--from")
    add_option(
        parser,
        "--topic",
        "T",
        "*, v:VECTOR_ID, ns:NAMESPACE, op:KIND or c:CUSTOM; repeat to match any of several; default: *",
        action="append",
        default=[],
    )
    add_start_argument(parser, "latest, for a new group earliest; an existing group ignores it")
    _add_count_argument(parser, "lines")
    add_option(
        parser,
        "--group",
        "G",
        "continue at this group's committed offset, which is stored beside the log. One member reads at "
        "a time, others stand by",
    )
    add_partition_arguments(parser)
    parser.add_argument(
        "--no-follow", dest="follow", action="store_false", help="stop at the present end of the log"
    )


def _add_get(verbs: Any) -> None:
    parser = add_verb_parser(
        verbs,
        "get",
        "a vector now, or as of a past offset or time",
        "get doc-1 --namespace docs --at 17 --data facts",
        _run_get,
        description="Folds the log's deltas of one vector; one JSON line. Exit status 1 if it is not alive.",
    )
    parser.add_argument("vector_id", metavar="VECTOR_ID")
    add_data_argument(parser)
    add_option(parser, "--stream", "NAME", "default: default", default=DEFAULT_STREAM)
    add_option(parser, "--namespace", "N", "default: the id's part before a colon, else default")
    add_option(parser, "--at", "POSITION", f"as of {POSITION_HELP}, inclusive; default: now")


# --- log


def _add_log(verbs: Any) -> None:
    parser = add_verb_parser(
        verbs,
        "log",
        "show, verify, export, restore or migrate a log",
        "log verify --data facts",
        _run_log,
        description="Every verb but migrate works also while a process writes the log.",
    )
    subverbs = add_subverbs(parser, "log")
    show = add_verb_parser(
        subverbs, "show", "one line per delta: offset, time, dot, operation, vector", "log show --data facts"
    )
    add_data_argument(show)
    add_place_arguments(show)
    add_start_argument(show, "earliest")
    _add_count_argument(show, "deltas")
    add_json_argument(show)

    help_ = "read and check all; 1 if corrupted"
    verify = add_verb_parser(subverbs, "verify", help_, "log verify --data facts")
    add_data_argument(verify)
    add_place_arguments(verify, lists=True)
    add_json_argument(verify)

    _add_log_export(subverbs)
    restore = add_verb_parser(
        subverbs,
        "restore",
        "create a data directory from a copy",
        "log restore --from backup --data facts",
        description="Copies what `log export --to` wrote, reads it back, and begins a new epoch at its end.",
    )
    add_option(restore, "--from", "DIR", "the copy", type=parse_directory, dest="source", required=True)
    add_data_argument(restore)

    migrate = add_verb_parser(
        subverbs,
        "migrate",
        "bring a data directory to the format of this version",
        "log migrate facts",
        description="Needs free space for the rewritten segments, and reports how much. If interrupted, it "
        "leaves the old directory, or one that the same command finishes. No server may have it open "
        "meanwhile.",
    )
    add_option(migrate, "data", "DIR", "the data directory", type=parse_directory)
    add_json_argument(migrate, "one JSON object instead of a sentence")


def _add_log_export(subverbs: Any) -> None:
    export = add_verb_parser(
        subverbs,
        "export",
        "write the log out as JSON lines or frames, or copy the directory",
        "log export --data facts --to backup",
        description="Writes deltas as JSON lines, or frames. With --to it copies the logs of all streams up "
        "to their recovery points, with the cursors, into a directory that opens as such.",
    )
    add_data_argument(export)
    add_option(export, "--stream", "NAME", "default: default")
    add_option(export, "--partition", "N", "default: all, one after the other", type=parse_count)
    add_start_argument(export, "earliest")
    _add_count_argument(export, "deltas")
    add_option(export, "--output", "FILE", "a new file; default: standard output")
    export.add_argument(
        "--format", choices=("jsonl", "frames"), default="jsonl", help="default: jsonl; frames: as in the log"
    )
    add_flag(export, "--skip-corrupt", "report corrupted frames, and continue after them")
    add_option(export, "--to", "DIR", "copy everything into this new directory", type=parse_directory)


# --- running


def _run_publish(options: Namespace) -> Coroutine[Any, Any, int]:
    from delta_prop.commands.publish import publish

    return publish(options)


def _run_subscribe(options: Namespace) -> Coroutine[Any, Any, int]:
    from delta_prop.commands.subscribe import subscribe

    return subscribe(options)


def _run_get(options: Namespace) -> int:
    from delta_prop.commands.vector import show_vector

    return show_vector(options)


def _run_status(options: Namespace) -> int | Coroutine[Any, Any, int]:
    if options.data is not None:
        from delta_prop.commands.status import show_status

        return show_status(options)
    from delta_prop.commands.top import show_server_status

    return show_server_status(options)


def _run_log(options: Namespace) -> int:
    if options.log_verb == "restore":
        from delta_prop.commands.backup import restore

        return restore(options)
    if options.log_verb == "migrate":
        from delta_prop.commands.migrate import migrate

        return migrate(options)
    from delta_prop.commands.log import VERBS

    return VERBS[options.log_verb](options)
