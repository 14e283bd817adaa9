"""Argument parsers of `sinks`, `groups`, `quarantine`, `jobs` and `token`; load no module that runs them."""

from __future__ import annotations

from argparse import SUPPRESS
from functools import partial
from typing import TYPE_CHECKING, Any

from delta_prop.commands.parsers import (
    POSITION_HELP,
    add_data_argument,
    add_json_argument,
    add_source_arguments,
    add_verb_parser,
    parse_directory,
)

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from delta_prop.commands.parsers import Runner


def add_operator_verbs(verbs: Any, run: Runner) -> None:
    """Add the verbs; `run` runs a coroutine to its end."""
    _add_sinks(verbs, run)
    _add_groups(verbs, run)
    _add_quarantine(verbs)
    _add_jobs(verbs, run)
    _add_token(verbs)


# --- sinks


def _add_sinks(verbs: Any, run: Runner) -> None:
    parser = add_verb_parser(
        verbs,
        "sinks",
        "list sinks and groups with their offsets, or act on one",
        "sinks --data facts | delta-prop sinks --http localhost:7374",
        description="Lists sinks and groups whose cursors are stored beside the log, and how many deltas "
        "their quarantines hold; with --http, the attached sinks of a server and their states. The verbs "
        "below work on a directory, also while it is served.",
    )
    # --data may precede or follow the second verb, so both parsers take it.
    add_source_arguments(parser, "--http", "a server's HTTP port", required=False)
    add_json_argument(parser)
    subverbs = parser.add_subparsers(title="verbs", metavar="VERB", dest="sinks_verb")
    _add_subverb(
        subverbs, "forget", "remove what is stored for a sink or group", "sinks forget audit --data facts"
    )
    _add_subverb(
        subverbs, "pause", "deliver nothing to it until it is resumed", "sinks pause audit --data facts"
    )
    _add_subverb(subverbs, "resume", "end a pause, or a stop", "sinks resume audit --data facts")
    _add_subverb(subverbs, "rebuild", "replace its data from the log", "sinks rebuild storage --data facts")
    reset = _add_subverb(
        subverbs, "reset", "move its cursor to another offset", "sinks reset audit --to earliest --data facts"
    )
    reset.add_argument("--to", metavar="POSITION", required=True, help=f"earliest, latest, {POSITION_HELP}")

    def run_verb(options: Namespace) -> int:
        from delta_prop.commands.sink_control import rebuild, reset, set_paused
        from delta_prop.commands.status import forget, show_sinks

        if getattr(options, "subverb_http", None) is not None:
            parser.error(
                f"{options.sinks_verb} works on a directory, also while it is served: give --data DIR"
            )
        data = getattr(options, "subverb_data", None) or options.data
        if options.server is not None and options.sinks_verb is None:
            return _show_server_sinks(options, run)
        if data is None:
            parser.error(
                "nothing to read: give --data DIR" + ("" if options.sinks_verb else " or --http HOST:PORT")
            )
        if options.sinks_verb == "forget":
            return forget(data, options.name)
        if options.sinks_verb == "reset":
            return reset(data, options.name, options.to)
        if options.sinks_verb == "rebuild":
            return rebuild(data, options.name)
        if options.sinks_verb is not None:
            return set_paused(data, options.name, options.sinks_verb)
        return show_sinks(data, as_json=options.json)

    parser.set_defaults(run=run_verb)


def _show_server_sinks(options: Namespace, run: Runner) -> int:
    from delta_prop.commands.connect_options import connect_options_of
    from delta_prop.commands.top import show_server_sinks

    connect_options = connect_options_of(options)
    return run(lambda: show_server_sinks(connect_options, as_json=options.json))


def _add_subverb(verbs: Any, name: str, help_: str, example: str) -> ArgumentParser:
    parser = add_verb_parser(verbs, name, help_, example)
    parser.add_argument("name", metavar="NAME")
    parser.add_argument(
        "--data", metavar="DIR", type=parse_directory, dest="subverb_data", help="the data directory"
    )
    parser.add_argument("--http", dest="subverb_http", help=SUPPRESS)  # parsed to be refused with a fix
    parser.set_defaults(subverb_data=None, subverb_http=None)
    return parser


# --- groups


def _add_groups(verbs: Any, run: Runner) -> None:
    parser = add_verb_parser(
        verbs,
        "groups",
        "list consumer groups and their offsets, or move one: list, reset",
        "groups list --data facts | delta-prop groups list --http localhost:7374",
        description="One member of a group reads, others stand by. `sinks forget` removes a group.",
    )
    subverbs = parser.add_subparsers(title="verbs", metavar="VERB", dest="groups_verb", required=True)
    list_ = add_verb_parser(subverbs, "list", "one line per group", "groups list --data facts")
    add_source_arguments(list_, "--http", "a server's HTTP port")
    add_json_argument(list_)
    list_.set_defaults(run=partial(_list_groups, run))
    reset = add_verb_parser(
        subverbs,
        "reset",
        "move a group to another offset",
        "groups reset indexer --to earliest --data facts",
        description="Works on a directory, also while it is served. Refused while a member reads for it.",
    )
    reset.add_argument("name", metavar="NAME")
    reset.add_argument(
        "--to",
        metavar="POSITION",
        required=True,
        help="earliest, latest, an offset, or a time like 2026-01-31T12:00:00Z",
    )
    reset.add_argument(
        "--force", action="store_true", help="also while a member reads: it goes on from the new offset"
    )
    add_data_argument(reset)
    reset.set_defaults(run=_reset_group)


def _list_groups(run: Runner, options: Namespace) -> int:
    from delta_prop.commands.connect_options import connect_options_of
    from delta_prop.commands.groups import list_directory_groups, list_server_groups

    if options.data is not None:
        return list_directory_groups(options.data, as_json=options.json)
    connect_options = connect_options_of(options)
    return run(lambda: list_server_groups(connect_options, as_json=options.json))


def _reset_group(options: Namespace) -> int:
    from delta_prop.commands.groups import reset

    return reset(options.data, options.name, options.to, force=options.force)


# --- quarantine


def _add_quarantine(verbs: Any) -> None:
    parser = add_verb_parser(
        verbs,
        "quarantine",
        "deltas that sinks rejected: list, show, replay, drop",
        "quarantine list --data facts",
        description="Deltas that sinks rejected, and their dependents. A replay or a drop is recorded, and "
        "carried out by the process that has the directory open, or by the next one.",
    )
    subverbs = parser.add_subparsers(title="verbs", metavar="VERB", dest="quarantine_verb", required=True)
    list_ = add_verb_parser(
        subverbs, "list", "one line per delta", "quarantine list --data facts --sink audit"
    )
    add_data_argument(list_)
    list_.add_argument("--sink", metavar="S", help="only this sink's")
    add_json_argument(list_)
    list_.set_defaults(run=_list_quarantine)

    show = add_verb_parser(subverbs, "show", "one delta in full", "quarantine show audit 17 --data facts")
    show.add_argument("sink", metavar="SINK")
    show.add_argument("offset", metavar="OFFSET", type=int)
    add_data_argument(show)
    add_json_argument(show)
    show.set_defaults(run=_show_quarantined)

    for name, help_ in (
        ("replay", "apply them once more, then the deltas that they block"),
        ("drop", "discard them; the deltas that they block are applied without them"),
    ):
        action_parser = add_verb_parser(subverbs, name, help_, f"quarantine {name} audit 17 --data facts")
        action_parser.add_argument("sink", metavar="SINK")
        action_parser.add_argument(
            "offsets", metavar="OFFSET", type=int, nargs="*", help="of deltas that it rejected"
        )
        action_parser.add_argument("--all", action="store_true", help="all that it rejected")
        add_data_argument(action_parser)
        action_parser.set_defaults(run=_act_on_quarantine)


def _list_quarantine(options: Namespace) -> int:
    from delta_prop.commands.quarantine import list_

    return list_(options.data, sink=options.sink, as_json=options.json)


def _show_quarantined(options: Namespace) -> int:
    from delta_prop.commands.quarantine import show

    return show(options.data, options.sink, options.offset, as_json=options.json)


def _act_on_quarantine(options: Namespace) -> int:
    from delta_prop.commands.quarantine import QuarantineSelection, submit_action

    selection = QuarantineSelection(options.data, options.sink, tuple(options.offsets), options.all)
    return submit_action(selection, options.quarantine_verb)


# --- jobs


def _add_jobs(verbs: Any, run: Runner) -> None:
    parser = add_verb_parser(
        verbs,
        "jobs",
        "list, show or abort jobs, staged or decided",
        "jobs list --data facts | delta-prop jobs abort nightly --to localhost:7373",
        description="The server stages the parts of a job, where nobody reads them, until the job is "
        "committed. It drops a job that nobody has decided for a day.",
    )
    subverbs = parser.add_subparsers(title="verbs", metavar="VERB", dest="jobs_verb", required=True)
    list_ = add_verb_parser(subverbs, "list", "one line per job", "jobs list --http localhost:7374")
    add_source_arguments(list_, "--http", "a server's HTTP port")
    add_json_argument(list_)
    list_.set_defaults(run=partial(_list_jobs, run))
    show = add_verb_parser(
        subverbs, "show", "one job and its progress", "jobs show nightly --to localhost:7373"
    )
    show.add_argument("job", metavar="JOB")
    add_source_arguments(show, "--to", "a server; given several times: its addresses, tried in turn")
    add_json_argument(show)
    show.set_defaults(run=_show_job)
    abort = add_verb_parser(
        subverbs, "abort", "drop the staged parts of a job", "jobs abort nightly --to localhost:7373"
    )
    abort.add_argument("job", metavar="JOB")
    add_source_arguments(abort, "--to", "a server; given several times: its addresses, tried in turn")
    abort.set_defaults(run=_abort_job)


def _list_jobs(run: Runner, options: Namespace) -> int:
    from delta_prop.commands.connect_options import connect_options_of
    from delta_prop.commands.jobs import list_directory_jobs, list_server_jobs

    if options.data is not None:
        return list_directory_jobs(options.data, as_json=options.json)
    connect_options = connect_options_of(options)
    return run(lambda: list_server_jobs(connect_options, as_json=options.json))


def _show_job(options: Namespace) -> int:
    from delta_prop.commands.connect_options import connect_options_of
    from delta_prop.commands.jobs import show

    source = connect_options_of(options) if options.data is None else options.data
    return show(source, options.job, as_json=options.json)


def _abort_job(options: Namespace) -> int:
    from delta_prop.commands.connect_options import connect_options_of
    from delta_prop.commands.jobs import abort

    return abort(connect_options_of(options) if options.data is None else options.data, options.job)


# --- token


def _add_token(verbs: Any) -> None:
    parser = add_verb_parser(
        verbs,
        "token",
        "create a token for a server's clients",
        "token new importer --publish --namespace docs >> tokens.toml",
        description="A server stores only hashes, so a token is shown once, when it is created.",
    )
    subverbs = parser.add_subparsers(title="verbs", metavar="VERB", dest="token_verb", required=True)
    new = add_verb_parser(
        subverbs,
        "new",
        "create a token; its lines for the token file go to standard output",
        "token new search --subscribe --namespace docs --namespace 'img-*' --expires 2027-01-31T00:00:00Z",
        description="The token goes to standard error, only this once; with --json both are one object.",
    )
    new.add_argument("name", metavar="NAME", help="for logs: letters, digits, '.', '_' and '-'")
    new.add_argument("--publish", action="store_true", help="it may send deltas")
    new.add_argument("--subscribe", action="store_true", help="it may read deltas")
    new.add_argument(
        "--forward", action="store_true", help="it belongs to another service, which forwards its whole log"
    )
    new.add_argument("--admin", action="store_true", help="it may see metrics, status and sinks")
    new.add_argument(
        "--namespace", metavar="N", action="append", help="a name, a prefix like 'img-*', or '*' for all"
    )
    new.add_argument("--operation", metavar="KIND", action="append", help="it may send only these kinds")
    new.add_argument("--rate", metavar="R", help="deltas per second; inf for no limit")
    new.add_argument("--burst", metavar="B", help="deltas at once")
    new.add_argument("--expires", metavar="TIME", help="like 2027-01-31T00:00:00Z, or 30d from now on")
    add_json_argument(new)
    new.set_defaults(run=_new_token)


def _new_token(options: Namespace) -> int:
    from delta_prop.commands.tokens import Literal, create_token, parse_expiry, parse_number

    rights = {right: getattr(options, right) for right in ("publish", "subscribe", "forward", "admin")}
    rights |= {"namespaces": options.namespace, "operations": options.operation}
    for key in ("rate", "burst"):
        text = getattr(options, key)
        rights[key] = None if text is None else Literal(parse_number(f"--{key}", text))
    rights["expires"] = None if options.expires is None else Literal(parse_expiry(options.expires))
    return create_token(options.name, rights, as_json=options.json)
