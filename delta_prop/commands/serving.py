"""How the verbs around a server are called: `serve`, `top`, `config`. Loads nothing that they need."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from delta_prop.commands.parsers import directory, server_arguments, verb_parser

if TYPE_CHECKING:
    from argparse import Namespace

    from delta_prop.commands.parsers import Runner

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("auto", "json", "text")


def add_server_verbs(verbs: Any, run: Runner) -> None:
    """Add them all; `run` runs a coroutine to its end."""
    _add_serve(verbs, run)
    _add_top(verbs, run)
    _add_config(verbs, run)


# --- serve


def _add_serve(verbs: Any, run: Runner) -> None:
    parser = verb_parser(
        verbs,
        "serve",
        "serve a data directory to producers and subscribers",
        "serve --data facts --port 7373",
        description="Prints `ready port=… http=…` once clients are accepted. SIGTERM and SIGINT answer what "
        "was taken, tell clients and end; a second one ends at once. SIGHUP reads the file of tokens anew.",
    )
    parser.add_argument("--config", metavar="FILE", help="a configuration in TOML; options say more than it")
    parser.add_argument("--data", metavar="DIR", type=directory, help="the data directory; made if needed")
    parser.add_argument("--host", metavar="H", help="where to listen; default: 127.0.0.1")
    parser.add_argument("--port", metavar="P", type=int, help="for 0xD3; 0: any free one; default: 7373")
    parser.add_argument("--http-port", metavar="P", type=int, help="for HTTP; 0: any; default: 7374")
    parser.add_argument(
        "--level",
        choices=("logged", "durable"),
        help="what readers are shown: what is synced (durable, the default), or what is written",
    )
    parser.add_argument("--tokens", metavar="FILE", help="who may do what; without it everybody everything")
    parser.add_argument(
        "--allow-anonymous",
        action="store_true",
        default=None,
        help="serve without tokens where other machines can connect",
    )
    parser.add_argument(
        "--rebuild",
        metavar="SINK",
        action="append",
        help="at this start, replace what this sink holds by what the log has; may be given several times",
    )
    parser.add_argument("--log-level", choices=LOG_LEVELS, help="default: info")
    parser.add_argument("--log-format", choices=LOG_FORMATS, help="default: text on a terminal, else json")

    def start(options: Namespace) -> int:
        from delta_prop.commands.serve import configured, serve
        from delta_prop_wire.delta import AckLevel

        level = options.level and AckLevel[options.level.upper()]
        given = {
            "": {"data": options.data},
            "server": {
                "host": options.host,
                "port": options.port,
                "http_port": options.http_port,
                "allow_anonymous": options.allow_anonymous,
            },
            "log": {"level": level},
            "access": {"tokens": options.tokens},
            "logging": {"level": options.log_level, "format": options.log_format},
        }
        configuration = configured(options.config, given, rebuild=options.rebuild or ())
        return run(lambda: serve(configuration, command=options.command))

    parser.set_defaults(run=start)


# --- top


def _add_top(verbs: Any, run: Runner) -> None:
    parser = verb_parser(
        verbs,
        "top",
        "a live view of a server: rates, queue, sinks, connections",
        "top --http localhost:7374",
        description="Draws anew each second until it is interrupted; once, where there is no terminal.",
    )
    server_arguments(parser, "--http", "the server's HTTP port")
    parser.add_argument("--once", action="store_true", help="draw once, and end")

    def start(options: Namespace) -> int:
        from delta_prop.commands.connecting import link_of
        from delta_prop.commands.top import top

        link = link_of(options)
        return run(lambda: top(link, once=options.once))

    parser.set_defaults(run=start)


# --- config


def _add_config(verbs: Any, run: Runner) -> None:
    parser = verb_parser(
        verbs,
        "config",
        "check a server's configuration, or show it with all defaults",
        "config check delta-prop.toml",
        description="A configuration is a TOML file; variables of the environment such as "
        "DELTA_PROP_SERVER__HEARTBEAT_S=3 override its keys, here as in serve.",
    )
    below = parser.add_subparsers(title="verbs", metavar="VERB", dest="config_verb", required=True)
    check = verb_parser(below, "check", "1 line: sound, or what is wrong", "config check delta-prop.toml")
    check.add_argument("file", metavar="FILE")
    check.set_defaults(run=partial(_check, run))

    show = verb_parser(below, "show", "every key with its value, as TOML", "config show delta-prop.toml")
    show.add_argument("file", metavar="FILE", nargs="?", help="without it: the defaults")
    show.add_argument("--json", action="store_true", help="one JSON object instead")
    show.set_defaults(run=_show)


def _check(run: Runner, options: Namespace) -> int:
    from delta_prop.commands.configure import check

    return run(lambda: check(options.file))


def _show(options: Namespace) -> int:
    from delta_prop.commands.configure import show

    return show(options.file, as_json=options.json)
