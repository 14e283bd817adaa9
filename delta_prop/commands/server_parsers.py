"""Argument parsers of `serve`, `top` and `config`; load no module that runs them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from delta_prop.commands.parsers import add_server_arguments, add_verb_parser, parse_directory

if TYPE_CHECKING:
    from argparse import Namespace

    from delta_prop.commands.parsers import Runner

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("auto", "json", "text")


def add_server_verbs(verbs: Any, run: Runner) -> None:
    """Add the verbs; `run` runs a coroutine to its end."""
    _add_serve(verbs, run)
    _add_top(verbs, run)
    _add_config(verbs, run)


# --- serve


def _add_serve(verbs: Any, run: Runner) -> None:
    parser = add_verb_parser(
        verbs,
        "serve",
        "serve a data directory to producers and subscribers",
        "serve --data facts --port 7373",
        description="Prints `ready port=… http=…` once clients are accepted. SIGTERM and SIGINT answer "
        "pending batches, notify clients and end; a second one ends at once. SIGHUP reloads the token file.",
    )
    parser.add_argument("--config", metavar="FILE", help="a configuration in TOML; options override it")
    parser.add_argument(
        "--data", metavar="DIR", type=parse_directory, help="the data directory; created if needed"
    )
    parser.add_argument("--host", metavar="H", help="address to listen on; default: 127.0.0.1")
    parser.add_argument("--port", metavar="P", type=int, help="port for 0xD3; 0: any free one; default: 7373")
    parser.add_argument(
        "--http-port", metavar="P", type=int, help="port for HTTP; 0: any free one; default: 7374"
    )
    parser.add_argument(
        "--read-level",
        choices=("logged", "durable"),
        help="rows that readers see: synced ones (durable, the default), or all written ones (logged)",
    )
    parser.add_argument(
        "--tokens", metavar="FILE", help="the token file; without it every client may do everything"
    )
    parser.add_argument(
        "--allow-anonymous",
        action="store_true",
        default=None,
        help="serve without tokens even if other machines can connect",
    )
    parser.add_argument(
        "--rebuild",
        metavar="SINK",
        action="append",
        help="at this start, replace this sink's data from the log; may be given several times",
    )
    parser.add_argument("--log-level", choices=LOG_LEVELS, help="default: info")
    parser.add_argument("--log-format", choices=LOG_FORMATS, help="default: text on a terminal, else json")

    def run_verb(options: Namespace) -> int:
        from delta_prop.commands.serve import build_configuration, serve
        from delta_prop_wire.delta import AckLevel

        level = options.read_level and AckLevel[options.read_level.upper()]
        given_options = {
            "": {"data": options.data},
            "server": {
                "host": options.host,
                "port": options.port,
                "http_port": options.http_port,
                "allow_anonymous": options.allow_anonymous,
            },
            "log": {"read_level": level},
            "access": {"tokens": options.tokens},
            "logging": {"level": options.log_level, "format": options.log_format},
        }
        configuration = build_configuration(options.config, given_options, rebuild=options.rebuild or ())
        return run(lambda: serve(configuration, command_line=options.command))

    parser.set_defaults(run=run_verb)


# --- top


def _add_top(verbs: Any, run: Runner) -> None:
    parser = add_verb_parser(
        verbs,
        "top",
        "a live view of a server: rates, queue, sinks, connections",
        "top --http localhost:7374",
        description="Redraws each second until it is interrupted; draws once if output is not a terminal.",
    )
    add_server_arguments(parser, "--http", "the server's HTTP port")
    parser.add_argument("--once", action="store_true", help="draw once and end")

    def run_verb(options: Namespace) -> int:
        from delta_prop.commands.connect_options import connect_options_of
        from delta_prop.commands.top import show_top

        connect_options = connect_options_of(options)
        return run(lambda: show_top(connect_options, once=options.once))

    parser.set_defaults(run=run_verb)


# --- config


def _add_config(verbs: Any, run: Runner) -> None:
    parser = add_verb_parser(
        verbs,
        "config",
        "check a server's configuration, or show it with all defaults",
        "config check delta-prop.toml",
        description="A configuration is a TOML file; environment variables such as "
        "DELTA_PROP_SERVER__HEARTBEAT_INTERVAL_S=3 override its keys, here as in serve.",
    )
    subverbs = parser.add_subparsers(title="verbs", metavar="VERB", dest="config_verb", required=True)
    check = add_verb_parser(
        subverbs, "check", "print one line: valid, or the first error", "config check delta-prop.toml"
    )
    check.add_argument("file", metavar="FILE")
    check.set_defaults(run=partial(_check_config, run))

    show = add_verb_parser(
        subverbs, "show", "every key with its value, as TOML", "config show delta-prop.toml"
    )
    show.add_argument("file", metavar="FILE", nargs="?", help="without it: all defaults")
    show.add_argument("--json", action="store_true", help="one JSON object instead")
    show.set_defaults(run=_show_config)


def _check_config(run: Runner, options: Namespace) -> int:
    from delta_prop.commands.configure import check

    return run(lambda: check(options.file))


def _show_config(options: Namespace) -> int:
    from delta_prop.commands.configure import show

    return show(options.file, as_json=options.json)
