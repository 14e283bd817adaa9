"""Argument parsers of `serve`, `top`, `config` and `trace`; load no module that runs them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Coroutine
from typing import Any

from delta_prop.commands.parsers import (
    TIME_HELP,
    add_data_argument,
    add_flag,
    add_json_argument,
    add_option,
    add_place_arguments,
    add_server_arguments,
    add_source_arguments,
    add_start_argument,
    add_subverbs,
    add_verb_parser,
)

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("auto", "json", "text")


def add_server_verbs(verbs: Any) -> None:
    """Add the verbs."""
    _add_serve(verbs)
    top = add_verb_parser(
        verbs,
        "top",
        "a live view of a server: rates, queue, sinks, connections",
        "top --http localhost:7374",
        _run_top,
        description="Redraws each second until it is interrupted; draws once if output is not a terminal. "
        "Shows all streams: their totals, the log and the queue of the stream default, and a row for each "
        "open partition of the others.",
    )
    add_server_arguments(top, "--http", "the server's HTTP port")
    add_flag(top, "--once", "draw once and end")
    _add_config(verbs)
    _add_trace(verbs)


def _add_serve(verbs: Any) -> None:
    parser = add_verb_parser(
        verbs,
        "serve",
        "serve a data directory to producers and subscribers",
        "serve --data facts --port 7373",
        _run_serve,
        description="Prints `ready port=… http=…` once clients are accepted. SIGTERM and SIGINT answer "
        "pending batches, notify clients and end; a second one ends at once. SIGHUP reloads the token file.",
    )
    add_option(parser, "--config", "FILE", "a configuration in TOML; options override it")
    add_data_argument(parser, "the data directory; created if needed", required=False)
    add_option(parser, "--host", "H", "address to listen on; default: 127.0.0.1")
    add_option(parser, "--port", "P", "port for 0xD3; 0: any free one; default: 7373", type=int)
    add_option(parser, "--http-port", "P", "port for HTTP; 0: any free one; default: 7374", type=int)
    add_option(
        parser, "--advertise", "HOST:PORT", "address that clients are told, behind address translation"
    )
    parser.add_argument(
        "--read-level",
        choices=("logged", "durable"),
        help="rows that readers see: synced ones (durable, the default), or all written ones (logged)",
    )
    add_option(parser, "--tokens", "FILE", "the token file; without it every client may do everything")
    parser.add_argument(
        "--allow-anonymous",
        action="store_true",
        default=None,
        help="serve without tokens even if other machines can connect",
    )
    add_option(
        parser,
        "--rebuild",
        "SINK",
        "at this start, replace this sink's data from the log; may be given several times",
        action="append",
    )
    parser.add_argument("--log-level", choices=LOG_LEVELS, help="default: info")
    parser.add_argument("--log-format", choices=LOG_FORMATS, help="default: text on a terminal, else json")


def _add_config(verbs: Any) -> None:
    parser = add_verb_parser(
        verbs,
        "config",
        "check a server's configuration, or show it with all defaults",
        "config check delta-prop.toml",
        _run_config,
        description="A configuration is a TOML file; environment variables such as "
        "DELTA_PROP_SERVER__HEARTBEAT_INTERVAL_S=3 override its keys, here as in serve.",
    )
    subverbs = add_subverbs(parser, "config")
    help_ = "print one line: valid, or the first error"
    check = add_verb_parser(subverbs, "check", help_, "config check delta-prop.toml")
    check.add_argument("file", metavar="FILE")
    help_ = "every key with its value, as TOML"
    show = add_verb_parser(subverbs, "show", help_, "config show delta-prop.toml")
    add_option(show, "file", "FILE", "without it: all defaults", nargs="?")
    add_json_argument(show, "one JSON object instead")


def _add_trace(verbs: Any) -> None:
    parser = add_verb_parser(
        verbs,
        "trace",
        "record times and sizes of deltas, without names and content",
        "trace record --from localhost:7373 --to monday.trace --for 10m",
        _run_trace,
        description="`simulate` replays a recording, e.g. to try this traffic on a slower sink.",
    )
    subverbs = add_subverbs(parser, "trace")
    record = add_verb_parser(
        subverbs,
        "record",
        "write a log's past or coming traffic to a file",
        "trace record --data facts --to monday.trace --start 2026-01-31T12:00:00Z --for 1h",
        description="Writes times, sizes, operations, priorities, and hashes of names under a salt that is "
        "discarded. Records new deltas of a server, or those in a directory's log.",
    )
    add_source_arguments(record, "--from")
    add_place_arguments(record)
    add_option(record, "--to", "FILE", "a new file", required=True)
    add_start_argument(record, "latest for a server, earliest for a directory", f"an offset, or {TIME_HELP}")
    add_option(
        record,
        "--until",
        "POSITION",
        "as for --start; latest is the present end of the log; default: latest for a directory; for a "
        "server, until --for is over or the command is interrupted",
    )
    add_option(record, "--for", "TIME", "span of the traffic to record: 90s, 10m, 2h or 1d", dest="span")
    help_ = "summarize a recording"
    show = add_verb_parser(subverbs, "show", help_, "trace show monday.trace")
    show.add_argument("file", metavar="FILE")
    add_json_argument(show)


# --- running


def _run_serve(options: Namespace) -> Coroutine[Any, Any, int]:
    from delta_prop.commands.serve import run_serve

    return run_serve(options)


def _run_top(options: Namespace) -> Coroutine[Any, Any, int]:
    from delta_prop.commands.top import show_top

    return show_top(options)


def _run_config(options: Namespace) -> int | Coroutine[Any, Any, int]:
    from delta_prop.commands.configure import check, show

    return check(options) if options.config_verb == "check" else show(options)


def _run_trace(options: Namespace) -> int | Coroutine[Any, Any, int]:
    if options.trace_verb == "record":
        from delta_prop.commands.trace_record import record

        return record(options)
    from delta_prop.commands.trace_summary import show_trace

    return show_trace(options)
