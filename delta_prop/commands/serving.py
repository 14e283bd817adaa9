"""How the verbs around a server are called: `config`. Loads nothing that they need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delta_prop.commands.parsers import verb_parser

if TYPE_CHECKING:
    from argparse import Namespace


def add_server_verbs(verbs: Any) -> None:
    """Add them all."""
    _add_config(verbs)


# --- config


def _add_config(verbs: Any) -> None:
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
    check.set_defaults(run=_check)

    show = verb_parser(below, "show", "every key with its value, as TOML", "config show delta-prop.toml")
    show.add_argument("file", metavar="FILE", nargs="?", help="without it: the defaults")
    show.add_argument("--json", action="store_true", help="one JSON object instead")
    show.set_defaults(run=_show)


def _check(options: Namespace) -> int:
    from delta_prop.commands.configure import check

    return check(options.file)


def _show(options: Namespace) -> int:
    from delta_prop.commands.configure import show

    return show(options.file, as_json=options.json)
