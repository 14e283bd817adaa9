"""Argument parsers of `sinks`, `groups`, `quarantine`, `jobs`, `streams` and `token`.

They load no module that runs the verbs.
"""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Coroutine
from typing import Any

from delta_prop.commands.parsers import (
    POSITION_HELP,
    TIME_HELP,
    add_data_argument,
    add_flag,
    add_json_argument,
    add_option,
    add_place_arguments,
    add_source_arguments,
    add_subverbs,
    add_verb_parser,
    parse_count,
    parse_positive,
)


def add_operator_verbs(verbs: Any) -> None:
    """Add the verbs."""
    _add_sinks(verbs)
    _add_groups(verbs)
    _add_quarantine(verbs)
    _add_jobs(verbs)
    _add_streams(verbs)
    _add_token(verbs)


# --- sinks


def _add_sinks(verbs: Any) -> None:
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
    add_place_arguments(parser, lists=True)
    add_json_argument(parser)
    subverbs = add_subverbs(parser, "sinks", required=False)
    _add_sink_verb(subverbs, "forget audit", "remove what is stored for a sink or group")
    _add_sink_verb(subverbs, "pause audit", "deliver nothing to it until it is resumed")
    _add_sink_verb(subverbs, "resume audit", "end a pause, or a stop")
    _add_sink_verb(subverbs, "rebuild storage", "replace its data from the log")
    reset = _add_sink_verb(subverbs, "reset audit --to earliest", "move its cursor to another offset")
    add_option(reset, "--to", "POSITION", f"earliest, latest, {POSITION_HELP}", required=True)

    def run_verb(options: Namespace) -> int | Coroutine[Any, Any, int]:
        verb = options.sinks_verb
        if getattr(options, "subverb_http", None) is not None:
            parser.error(f"{verb} works on a directory, also while it is served: give --data DIR")
        for name in ("data", "stream", "partition"):
            given = getattr(options, f"subverb_{name}", None)
            setattr(options, name, getattr(options, name) if given is None else given)
        if options.server is not None and verb is None:
            from delta_prop.commands.top import show_server_sinks

            return show_server_sinks(options)
        if options.data is None:
            parser.error("nothing to read: give --data DIR" + ("" if verb else " or --http HOST:PORT"))
        from delta_prop.commands.sinks import control_sink, forget, show_sinks

        run = {None: show_sinks, "forget": forget}.get(verb, control_sink)
        return run(options)

    parser.set_defaults(run=run_verb)


def _add_sink_verb(verbs: Any, example: str, help_: str) -> ArgumentParser:
    parser = add_verb_parser(verbs, example.partition(" ")[0], help_, f"sinks {example} --data facts")
    parser.add_argument("name", metavar="NAME")
    add_data_argument(parser, dest="subverb_data", required=False)
    add_place_arguments(parser, prefix="subverb_")
    parser.add_argument("--http", dest="subverb_http", help=SUPPRESS)  # parsed to be refused with a fix
    parser.set_defaults(subverb_data=None, subverb_http=None)
    return parser


# --- groups


def _add_groups(verbs: Any) -> None:
    parser = add_verb_parser(
        verbs,
        "groups",
        "list consumer groups and their offsets, or move one: list, reset",
        "groups list --data facts | delta-prop groups list --http localhost:7374",
        _run_groups,
        description="One member of a group reads, others stand by. `sinks forget` removes a group.",
    )
    subverbs = add_subverbs(parser, "groups")
    list_ = add_verb_parser(subverbs, "list", "one line per group", "groups list --data facts")
    add_source_arguments(list_, "--http", "a server's HTTP port")
    add_place_arguments(list_, lists=True)
    add_json_argument(list_)
    reset = add_verb_parser(
        subverbs,
        "reset",
        "move a group to another offset",
        "groups reset indexer --to earliest --data facts",
        description="Works on a directory, also while it is served. Refused while a member reads for it.",
    )
    reset.add_argument("name", metavar="NAME")
    add_option(reset, "--to", "POSITION", f"earliest, latest, an offset, or {TIME_HELP}", required=True)
    add_flag(reset, "--force", "also while a member reads: it goes on from the new offset")
    add_data_argument(reset)
    add_place_arguments(reset)


def _run_groups(options: Namespace) -> int | Coroutine[Any, Any, int]:
    from delta_prop.commands.groups import list_groups, reset

    return list_groups(options) if options.groups_verb == "list" else reset(options)


# --- quarantine


def _add_quarantine(verbs: Any) -> None:
    parser = add_verb_parser(
        verbs,
        "quarantine",
        "deltas that sinks rejected: list, show, replay, drop",
        "quarantine list --data facts",
        _run_quarantine,
        description="Deltas that sinks rejected, and their dependents. A replay or a drop is recorded, and "
        "carried out by the process that has the directory open, or by the next one.",
    )
    subverbs = add_subverbs(parser, "quarantine")
    list_ = add_verb_parser(
        subverbs, "list", "one line per delta", "quarantine list --data facts --sink audit"
    )
    add_data_argument(list_)
    add_place_arguments(list_, lists=True)
    add_option(list_, "--sink", "S", "only this sink's")
    add_json_argument(list_)

    example = "quarantine show audit 17 --data facts"
    show = add_verb_parser(subverbs, "show", "one delta in full", example)
    show.add_argument("sink", metavar="SINK")
    show.add_argument("offset", metavar="OFFSET", type=int)
    add_data_argument(show)
    add_place_arguments(show)
    add_json_argument(show)

    for name, help_ in (
        ("replay", "apply them once more, then the deltas that they block"),
        ("drop", "discard them; the deltas that they block are applied without them"),
    ):
        example = f"quarantine {name} audit 17 --data facts"
        action_parser = add_verb_parser(subverbs, name, help_, example)
        action_parser.add_argument("sink", metavar="SINK")
        add_option(action_parser, "offsets", "OFFSET", "of deltas that it rejected", type=int, nargs="*")
        add_flag(action_parser, "--all", "all that it rejected")
        add_data_argument(action_parser)
        add_place_arguments(action_parser)


def _run_quarantine(options: Namespace) -> int:
    from delta_prop.commands.quarantine import list_, show, submit_action

    return {"list": list_, "show": show}.get(options.quarantine_verb, submit_action)(options)


# --- jobs


def _add_jobs(verbs: Any) -> None:
    parser = add_verb_parser(
        verbs,
        "jobs",
        "list, show or abort jobs, staged or decided",
        "jobs list --data facts | delta-prop jobs abort nightly --to localhost:7373",
        _run_jobs,
        description="The server stages the parts of a job, where nobody reads them, until the job is "
        "committed. It drops a job that nobody has decided for a day.",
    )
    subverbs = add_subverbs(parser, "jobs")
    example = "jobs list --http localhost:7374"
    list_ = add_verb_parser(subverbs, "list", "one line per job", example)
    add_source_arguments(list_, "--http", "a server's HTTP port")
    add_place_arguments(list_, lists=True)
    add_json_argument(list_)
    for name, help_ in (("show", "one job and its progress"), ("abort", "drop the staged parts of a job")):
        example = f"jobs {name} nightly --to localhost:7373"
        one_job = add_verb_parser(subverbs, name, help_, example)
        one_job.add_argument("job", metavar="JOB")
        add_source_arguments(one_job, "--to")
        add_place_arguments(one_job)
        if name == "show":
            add_json_argument(one_job)


def _run_jobs(options: Namespace) -> int | Coroutine[Any, Any, int]:
    from delta_prop.commands.jobs import VERBS

    return VERBS[options.jobs_verb](options)


# --- streams


def _add_streams(verbs: Any) -> None:
    parser = add_verb_parser(
        verbs,
        "streams",
        "list, show, create, alter, truncate or delete streams, or erase a vector",
        "streams create orders --partitions 4 --to localhost:7373",
        _run_streams,
        description="A stream is kept in partitions, each a log of its own; their number is fixed. The "
        "stream default exists in every data directory. --data works while no process serves the "
        "directory; list and show also while one does.",
    )
    subverbs = add_subverbs(parser, "streams")
    list_ = add_verb_parser(subverbs, "list", "one line per stream", "streams list --to localhost:7373")
    _add_streams_source(list_)
    show = add_verb_parser(
        subverbs, "show", "a stream, and where its logs begin and end", "streams show orders --data facts"
    )
    show.add_argument("name", metavar="NAME")
    _add_streams_source(show)
    create = add_verb_parser(
        subverbs, "create", "add a stream", "streams create orders --partitions 4 --to localhost:7373"
    )
    create.add_argument("name", metavar="NAME")
    add_option(
        create,
        "--partitions",
        "N",
        "their number, fixed for good; default: 1",
        type=parse_positive,
        default=1,
    )
    add_flag(create, "--if-not-exists", "succeed if it exists with as many partitions and these settings")
    _add_streams_change(create)
    alter = add_verb_parser(
        subverbs,
        "alter",
        "change settings of a stream",
        "streams alter orders --set retention_s=86400 --to localhost:7373",
    )
    alter.add_argument("name", metavar="NAME")
    _add_streams_change(alter)
    _add_streams_removal(subverbs)


def _add_streams_removal(subverbs: Any) -> None:
    delete = add_verb_parser(
        subverbs, "delete", "remove a stream with all its rows", "streams delete orders --yes --data facts"
    )
    delete.add_argument("name", metavar="NAME")
    add_flag(delete, "--yes", "do not ask: delete")
    _add_streams_change(delete, has_settings=False)
    truncate = add_verb_parser(
        subverbs,
        "truncate",
        "remove the rows below an offset",
        "streams truncate orders --partition 2 --before 1000 --to localhost:7373",
        description="Removes whole segments, in the background, once no sink needs their rows. A compacted "
        "stream keeps the latest state of each vector in its snapshot.",
    )
    truncate.add_argument("name", metavar="NAME")
    add_option(truncate, "--before", "OFFSET", "the first offset to keep", type=parse_count, required=True)
    add_option(truncate, "--partition", "N", "default: 0", type=parse_count, default=0)
    _add_streams_change(truncate, has_settings=False)
    erase = add_verb_parser(
        subverbs,
        "erase",
        "delete a vector, and remove it from all files",
        "streams erase people --vector ada --yes --to localhost:7373",
        description="Deletes the vector, has a snapshot replace the rows of its partition, and removes what "
        "checkpoints, quarantines and attached sinks have of it. Backups and other services keep what they "
        "have.",
    )
    erase.add_argument("name", metavar="NAME")
    add_option(erase, "--vector", "ID", "its id", required=True)
    add_option(erase, "--namespace", "NAME", "default: the id's part before a colon, else default")
    add_option(erase, "--timeout-s", "S", "seconds to wait; default: 60", type=parse_positive, default=60)
    add_flag(erase, "--yes", "do not ask: erase")
    _add_streams_change(erase, has_settings=False)


def _add_streams_source(parser: ArgumentParser) -> None:
    add_source_arguments(parser, "--to")
    add_json_argument(parser, "JSON instead of text")


def _add_streams_change(parser: ArgumentParser, *, has_settings: bool = True) -> None:
    if has_settings:
        add_option(
            parser,
            "--set",
            "NAME=VALUE",
            "retention_s, retention_bytes, compact, tombstone_retention_s, compress or ack_level, or a "
            "quota: bytes_in_s, rows_in_s, bytes_out_s, rows_out_s; NAME= for the service's value; may be "
            "repeated",
            action="append",
            default=[],
        )
    add_flag(parser, "--dry-run", "check it, and change nothing")
    _add_streams_source(parser)


def _run_streams(options: Namespace) -> int | Coroutine[Any, Any, int]:
    from delta_prop.commands.streams import VERBS

    return VERBS[options.streams_verb](options)


# --- token


def _add_token(verbs: Any) -> None:
    parser = add_verb_parser(
        verbs,
        "token",
        "create a token for a server's clients",
        "token new importer --publish --namespace docs >> tokens.toml",
        description="A server stores only hashes, so a token is shown once, when it is created.",
    )
    new = add_verb_parser(
        add_subverbs(parser, "token"),
        "new",
        "create a token; its lines for the token file go to standard output",
        "token new search --subscribe --namespace docs --namespace 'img-*' --expires 2027-01-31T00:00:00Z",
        _run_token_new,
        description="The token goes to standard error, only this once; with --json both are one object.",
    )
    add_option(new, "name", "NAME", "for logs: letters, digits, '.', '_' and '-'")
    add_flag(new, "--publish", "it may send deltas")
    add_flag(new, "--subscribe", "it may read deltas")
    add_flag(new, "--forward", "it belongs to another service, which forwards its whole log")
    add_flag(new, "--admin", "it may see metrics, status and sinks")
    add_flag(new, "--manage", "it may create, alter, truncate and delete streams")
    add_option(new, "--namespace", "N", "a name, a prefix like 'img-*', or '*' for all", action="append")
    add_option(new, "--stream", "NAME", "a name, or a prefix like 'web-*'; default: all", action="append")
    add_option(new, "--operation", "KIND", "it may send only these kinds", action="append")
    add_option(new, "--rate", "R", "deltas per second; inf for no limit")
    add_option(new, "--burst", "B", "deltas at once")
    add_option(new, "--expires", "TIME", "like 2027-01-31T00:00:00Z, or 30d from now on")
    add_json_argument(new)


def _run_token_new(options: Namespace) -> int:
    from delta_prop.commands.tokens import create_token

    return create_token(options)
