"""How operators' verbs are called: `sinks`, `quarantine`, `jobs`, `token`. Loads nothing that they need."""

from __future__ import annotations

from argparse import SUPPRESS
from functools import partial
from typing import TYPE_CHECKING, Any

from delta_prop.commands.parsers import (
    AT_HELP,
    data_argument,
    directory,
    json_argument,
    place_arguments,
    verb_parser,
)

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from delta_prop.commands.parsers import Runner


def add_operator_verbs(verbs: Any, run: Runner) -> None:
    """Add them all; `run` runs a coroutine to its end."""
    _add_sinks(verbs, run)
    _add_groups(verbs, run)
    _add_quarantine(verbs)
    _add_jobs(verbs, run)
    _add_token(verbs)


# --- sinks


def _add_sinks(verbs: Any, run: Runner) -> None:
    parser = verb_parser(
        verbs,
        "sinks",
        "who reads the log and how far; act on one",
        "sinks --data facts | delta-prop sinks --http localhost:7374",
        description="Sinks and groups whose place is kept beside the log, and what their quarantines hold; "
        "of a server those that are attached, and what they do. The verbs below work on a directory, also "
        "beside its server.",
    )
    # DIR may stand before or behind the verb below, so both parsers take it.
    place_arguments(parser, "--http", "a server's HTTP port", required=False)
    json_argument(parser)
    below = parser.add_subparsers(title="verbs", metavar="VERB", dest="sinks_verb")
    _below(below, "forget", "remember nothing of a sink or group", "sinks forget audit --data facts")
    _below(below, "pause", "bring it nothing until it is resumed", "sinks pause audit --data facts")
    _below(below, "resume", "end a pause, or a stop", "sinks resume audit --data facts")
    _below(below, "rebuild", "replace its data by what the log holds", "sinks rebuild storage --data facts")
    reset = _below(
        below, "reset", "have it go on elsewhere in the log", "sinks reset audit --to earliest --data facts"
    )
    reset.add_argument("--to", metavar="PLACE", required=True, help=f"earliest, latest, {AT_HELP}")

    def start(options: Namespace) -> int:
        from delta_prop.commands.look import forget, sinks
        from delta_prop.commands.steer import rebuild, reset, set_paused

        if getattr(options, "below_http", None) is not None:
            parser.error(
                f"{options.sinks_verb} works on a directory, also beside its server: give --data DIR"
            )
        data = getattr(options, "below_data", None) or options.data
        if options.server is not None and options.sinks_verb is None:
            return _sinks_of_a_server(options, run)
        if data is None:
            parser.error("say where: --data DIR" + ("" if options.sinks_verb else " or --http HOST:PORT"))
        if options.sinks_verb == "forget":
            return forget(data, options.name)
        if options.sinks_verb == "reset":
            return reset(data, options.name, options.to)
        if options.sinks_verb == "rebuild":
            return rebuild(data, options.name)
        if options.sinks_verb is not None:
            return set_paused(data, options.name, options.sinks_verb)
        return sinks(data, as_json=options.json)

    parser.set_defaults(run=start)


def _sinks_of_a_server(options: Namespace, run: Runner) -> int:
    from delta_prop.commands.connecting import link_of
    from delta_prop.commands.top import sinks

    link = link_of(options)
    return run(lambda: sinks(link, as_json=options.json))


def _below(verbs: Any, name: str, help_: str, example: str) -> ArgumentParser:
    parser = verb_parser(verbs, name, help_, example)
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("--data", metavar="DIR", type=directory, dest="below_data", help="the data directory")
    parser.add_argument("--http", dest="below_http", help=SUPPRESS)  # which is refused with a cure
    parser.set_defaults(below_data=None, below_http=None)
    return parser


# --- groups


def _add_groups(verbs: Any, run: Runner) -> None:
    parser = verb_parser(
        verbs,
        "groups",
        "how far groups of subscribers are; have one go on elsewhere: list, reset",
        "groups list --data facts | delta-prop groups list --http localhost:7374",
        description="One member of a group reads, others stand by. `sinks forget` remembers nothing of one.",
    )
    below = parser.add_subparsers(title="verbs", metavar="VERB", dest="groups_verb", required=True)
    list_ = verb_parser(below, "list", "one line a group", "groups list --data facts")
    place_arguments(list_, "--http", "a server's HTTP port")
    json_argument(list_)
    list_.set_defaults(run=partial(_list_groups, run))
    reset = verb_parser(
        below,
        "reset",
        "have a group go on elsewhere in the log",
        "groups reset indexer --to earliest --data facts",
        description="Works on a directory, also beside its server. Refused while a member reads for it.",
    )
    reset.add_argument("name", metavar="NAME")
    reset.add_argument(
        "--to",
        metavar="PLACE",
        required=True,
        help="earliest, latest, an offset, or a time like 2026-01-31T12:00:00Z",
    )
    reset.add_argument(
        "--force", action="store_true", help="while a member reads, too: it goes on from the new place"
    )
    data_argument(reset)
    reset.set_defaults(run=_reset_group)


def _list_groups(run: Runner, options: Namespace) -> int:
    from delta_prop.commands.connecting import link_of
    from delta_prop.commands.groups import list_of_directory, list_of_server

    if options.data is not None:
        return list_of_directory(options.data, as_json=options.json)
    link = link_of(options)
    return run(lambda: list_of_server(link, as_json=options.json))


def _reset_group(options: Namespace) -> int:
    from delta_prop.commands.groups import reset

    return reset(options.data, options.name, options.to, force=options.force)


# --- quarantine


def _add_quarantine(verbs: Any) -> None:
    parser = verb_parser(
        verbs,
        "quarantine",
        "what sinks rejected: list, show, replay, drop",
        "quarantine list --data facts",
        description="What sinks have set aside. A replay or a drop is recorded, and carried out by the "
        "process that has the directory open, or by the next one.",
    )
    below = parser.add_subparsers(title="verbs", metavar="VERB", dest="quarantine_verb", required=True)
    list_ = verb_parser(below, "list", "one line a delta", "quarantine list --data facts --sink audit")
    data_argument(list_)
    list_.add_argument("--sink", metavar="S", help="this sink's alone")
    json_argument(list_)
    list_.set_defaults(run=_list)

    show = verb_parser(below, "show", "one delta, whole", "quarantine show audit 17 --data facts")
    show.add_argument("sink", metavar="SINK")
    show.add_argument("offset", metavar="OFFSET", type=int)
    data_argument(show)
    json_argument(show)
    show.set_defaults(run=_show)

    for name, help_ in (
        ("replay", "have them applied once more, and what waits behind them"),
        ("drop", "give them up; what waits behind them is applied without them"),
    ):
        act = verb_parser(below, name, help_, f"quarantine {name} audit 17 --data facts")
        act.add_argument("sink", metavar="SINK")
        act.add_argument("offsets", metavar="OFFSET", type=int, nargs="*", help="of deltas that it rejected")
        act.add_argument("--all", action="store_true", help="all that it rejected")
        data_argument(act)
        act.set_defaults(run=_act)


def _list(options: Namespace) -> int:
    from delta_prop.commands.quarantine import list_

    return list_(options.data, sink=options.sink, as_json=options.json)


def _show(options: Namespace) -> int:
    from delta_prop.commands.quarantine import show

    return show(options.data, options.sink, options.offset, as_json=options.json)


def _act(options: Namespace) -> int:
    from delta_prop.commands.quarantine import Chosen, act

    chosen = Chosen(options.data, options.sink, tuple(options.offsets), options.all)
    return act(chosen, options.quarantine_verb)


# --- jobs


def _add_jobs(verbs: Any, run: Runner) -> None:
    parser = verb_parser(
        verbs,
        "jobs",
        "what is staged for jobs, and what was decided: list, show, abort",
        "jobs list --data facts | delta-prop jobs abort nightly --to localhost:7373",
        description="Jobs stage their parts aside, where nobody reads them, until they are committed. One of "
        "which nobody decides is dropped after a day.",
    )
    below = parser.add_subparsers(title="verbs", metavar="VERB", dest="jobs_verb", required=True)
    list_ = verb_parser(below, "list", "one line a job", "jobs list --http localhost:7374")
    place_arguments(list_, "--http", "a server's HTTP port")
    json_argument(list_)
    list_.set_defaults(run=partial(_list_jobs, run))
    show = verb_parser(below, "show", "one job, and how far it is", "jobs show nightly --to localhost:7373")
    show.add_argument("job", metavar="JOB")
    place_arguments(show, "--to", "a server; several times: addresses of one, tried in turn")
    json_argument(show)
    show.set_defaults(run=_show_job)
    abort = verb_parser(
        below, "abort", "drop what is staged for a job", "jobs abort nightly --to localhost:7373"
    )
    abort.add_argument("job", metavar="JOB")
    place_arguments(abort, "--to", "a server; several times: addresses of one, tried in turn")
    abort.set_defaults(run=_abort_job)


def _list_jobs(run: Runner, options: Namespace) -> int:
    from delta_prop.commands.connecting import link_of
    from delta_prop.commands.jobs import list_of_directory, list_of_server

    if options.data is not None:
        return list_of_directory(options.data, as_json=options.json)
    link = link_of(options)
    return run(lambda: list_of_server(link, as_json=options.json))


def _show_job(options: Namespace) -> int:
    from delta_prop.commands.connecting import link_of
    from delta_prop.commands.jobs import show

    place = link_of(options) if options.data is None else options.data
    return show(place, options.job, as_json=options.json)


def _abort_job(options: Namespace) -> int:
    from delta_prop.commands.connecting import link_of
    from delta_prop.commands.jobs import abort

    return abort(link_of(options) if options.data is None else options.data, options.job)


# --- token


def _add_token(verbs: Any) -> None:
    parser = verb_parser(
        verbs,
        "token",
        "make a token for clients of a server",
        "token new importer --publish --namespace docs >> tokens.toml",
        description="A server keeps hashes alone, so a token is shown once, when it is made.",
    )
    below = parser.add_subparsers(title="verbs", metavar="VERB", dest="token_verb", required=True)
    new = verb_parser(
        below,
        "new",
        "draw a token; its lines for the file of tokens go to standard output",
        "token new search --subscribe --namespace docs --namespace 'img-*' --expires 2027-01-31T00:00:00Z",
        description="The token itself goes to standard error, this once; with --json both are one object.",
    )
    new.add_argument("name", metavar="NAME", help="for logs: letters, digits, '.', '_' and '-'")
    new.add_argument("--publish", action="store_true", help="it may send deltas")
    new.add_argument("--subscribe", action="store_true", help="it may read deltas")
    new.add_argument(
        "--forward", action="store_true", help="it is another service, which sends its whole log"
    )
    new.add_argument("--admin", action="store_true", help="it may see metrics, status and sinks")
    new.add_argument(
        "--namespace", metavar="N", action="append", help="a name, a beginning like 'img-*', or '*' for all"
    )
    new.add_argument("--operation", metavar="KIND", action="append", help="it may send these kinds alone")
    new.add_argument("--rate", metavar="R", help="deltas a second; inf for no bound")
    new.add_argument("--burst", metavar="B", help="deltas at once")
    new.add_argument("--expires", metavar="TIME", help="like 2027-01-31T00:00:00Z, or 30d from now on")
    json_argument(new)
    new.set_defaults(run=_new_token)


def _new_token(options: Namespace) -> int:
    from delta_prop.commands.tokens import Literal, expiry, new, number

    rights = {right: getattr(options, right) for right in ("publish", "subscribe", "forward", "admin")}
    rights |= {"namespaces": options.namespace, "operations": options.operation}
    for key in ("rate", "burst"):
        text = getattr(options, key)
        rights[key] = None if text is None else Literal(number(f"--{key}", text))
    rights["expires"] = None if options.expires is None else Literal(expiry(options.expires))
    return new(options.name, rights, as_json=options.json)
