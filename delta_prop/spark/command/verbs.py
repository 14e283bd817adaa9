"""What the verbs of `delta-prop spark` do: a session, a job, and what it gives to people and programs."""

from __future__ import annotations

import re
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from delta_prop.commands import edge
from delta_prop.commands.connecting import link_of
from delta_prop.commands.places import EARLIEST, LATEST, parse_at
from delta_prop.spark.command import shown
from delta_prop.spark.edge import on_terminal
from delta_prop.spark.java import check_java, check_packages
from delta_prop_wire.delta import DEFAULT_NAMESPACE
from delta_prop_wire.errors import DeltaPropError, UsageError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

    from delta_prop.commands.places import At
    from delta_prop.spark.jobs.auditing import Repaired
    from delta_prop.spark.options import Remote

OK, FAILED = 0, 1
_OURS = re.compile(r"^(?:delta_prop\w*\.)+(?:\w+\.)*(\w+): (.+)$", re.MULTILINE)
_STATE = re.compile(r"\s*SQLSTATE: \w+\s*$")


class JobFailed(DeltaPropError):
    """A job failed on Spark; the message is what was said where it did."""


# --- tables


def run_diff(options: Namespace) -> int:
    """`diff`. Raises UsageError, JobFailed, and what reading the log raises."""
    from delta_prop.spark.jobs.diffing import diff
    from delta_prop.spark.jobs.importing import read_table
    from delta_prop.spark.jobs.replaying import CONTENT, replay

    _check_output(options)
    if len(options.tables) != (2 if options.data is None else 1):
        wanted = "the old and the new one" if options.data is None else "the new one alone, beside --data"
        raise UsageError(f"{len(options.tables)} tables are named: name {wanted}")
    with _spark(options) as spark:
        *before, new = (read_table(spark, path, options.format) for path in options.tables)
        namespace = options.namespace
        if options.data is None:
            old = before[0]
        else:
            if namespace is None and "namespace" not in new.columns:
                namespace = DEFAULT_NAMESPACE
            old = _held(replay(spark, options.data).where("alive").select(*CONTENT), options, namespace)
        vector, threshold = _vector(options.vector), options.threshold
        deltas = diff(old, new, key=options.key, vector=vector, namespace=namespace, threshold=threshold)
        _give_deltas(deltas, options)
    return OK


def _held(states: DataFrame, options: Namespace, namespace: str | None) -> DataFrame:
    """States as a table with the columns of the new one; of one namespace, where that has one alone."""
    if not isinstance(_vector(options.vector), str):
        raise UsageError("--vector names several columns, and the log has one vector: put them into one, too")
    if namespace is not None:
        states = states.where(states.namespace == namespace).drop("namespace")
    return states.withColumnsRenamed({"vector_id": options.key, "vector": options.vector})


def run_import(options: Namespace) -> int:
    """`import`. Raises UsageError, JobFailed."""
    from delta_prop.spark.jobs.importing import read_table, to_deltas

    _check_output(options)
    with _spark(options) as spark:
        table = read_table(spark, options.table, options.format)
        vector = _vector(options.vector)
        _give_deltas(to_deltas(table, key=options.key, vector=vector, namespace=options.namespace), options)
    return OK


def _vector(text: str) -> str | list[str]:
    names = [name.strip() for name in text.split(",")]
    return names if len(names) > 1 else text


def _check_output(options: Namespace) -> None:
    if options.server is not None and not options.producer:
        raise UsageError(
            "--to: give the job a --producer too, under which it has one effect however often it runs"
        )


def _give_deltas(deltas: DataFrame, options: Namespace) -> None:
    if options.server is None:
        shown.give(deltas, options.output, shown.delta_line)
        return
    from delta_prop.spark.jobs.importing import write_deltas
    from delta_prop.spark.source import register

    register(deltas.sparkSession)
    link = link_of(options)
    more: dict[str, Any] = {} if link.token is None else {"token": link.token}
    if link.tls is not None:
        tls = link.tls
        named = {"tlsCa": tls.authorities, "tlsName": tls.server_name}
        named |= {"tlsCertificate": tls.certificate, "tlsKey": tls.key}
        more |= {"tls": "true"} | {name: one for name, one in named.items() if one is not None}
    write_deltas(deltas, ",".join(link.addresses), options.producer, **more)


# --- the log


def run_replay(options: Namespace) -> int:
    """`replay`. Raises UsageError, JobFailed, and what reading the log raises."""
    from delta_prop.spark.jobs.replaying import replay

    at = _at(options.at)
    with _spark(options) as spark:
        states = replay(spark, _place(options), at)
        states = states.where("alive") if options.alive else states
        if options.output is None and not options.json:
            shown.put_table(states.select("namespace", "vector_id", "alive", "vector", "metadata", "offset"))
        else:
            shown.give(states, options.output, shown.state_line)
    return OK


def run_rebuild(options: Namespace) -> int:
    """`rebuild`. Raises UsageError, JobFailed, and what reading the log raises."""
    from delta_prop.spark.jobs.rebuilding import rebuild
    from delta_prop_sinks.storage_file import FileFailed

    at, progress = _at(options.at), edge.Progress()
    with _spark(options) as spark:
        try:
            made = rebuild(
                spark,
                options.data,
                options.storage,
                at=at,
                replace=options.replace,
                tell=lambda rows: progress.tell(f"{rows:,} rows"),
            )
        except FileFailed as failure:
            raise JobFailed(str(failure)) from failure
        finally:
            progress.end()
    edge.put(
        f"{options.storage}: {made.rows:,} rows, {made.alive:,} of them alive; its sink goes on from offset "
        f"{made.next_offset}"
    )
    return OK


def run_audit(options: Namespace) -> int:
    """`audit`. Raises UsageError, JobFailed, Refused, and what reading the log raises."""
    from delta_prop.spark.jobs.auditing import audit
    from delta_prop.spark.jobs.importing import read_table

    if options.server is not None and not options.repair:
        raise UsageError("--to: only a repair sends something; add --repair")
    with _spark(options) as spark:
        sink = options.storage if options.contents is None else read_table(spark, options.contents)
        name = options.sink or (None if options.storage is None else "storage")
        found = audit(spark, options.data, sink, come=options.come, name=name).localCheckpoint()
        counts = {row.difference: row["count"] for row in found.groupBy("difference").count().collect()}
        if options.output is not None or options.json:
            shown.give(found, options.output, shown.difference_line)
        elif counts:
            shown.put_table(found.select("difference", "namespace", "vector_id", "reason"))
        count = sum(counts.values())
        told = ", ".join(f"{number:,} {kind}" for kind, number in sorted(counts.items()))
        edge.note(f"{count:,} differences: {told}" if counts else "no differences")
        if not counts or not options.repair:
            return FAILED if counts else OK
        repaired = _repair(found, options)
    edge.note(
        f"{repaired.mended:,} of {count:,} were said again; {repaired.moved_on:,} have moved on since, "
        f"{repaired.refused:,} were refused"
    )
    for line in repaired.told:
        edge.note(line)
    return OK if repaired.mended == count else FAILED


def _repair(found: DataFrame, options: Namespace) -> Repaired:
    from delta_prop.spark.jobs.auditing import repair, repair_directory

    if options.server is None:
        import anyio

        return anyio.run(partial(repair_directory, found, options.data))
    from delta_prop.client import SyncProducer

    link, name = link_of(options), options.producer or edge.drawn_name()
    with SyncProducer(link.addresses, name=name, token=link.token, tls=link.tls) as producer:
        return repair(found, producer)


def run_stats(options: Namespace) -> int:
    """`stats`. Raises UsageError, JobFailed, and what reading the log raises."""
    from delta_prop.spark.jobs.counting import stats

    since = EARLIEST if options.start is None else parse_at("--start", options.start)
    until = LATEST if options.until is None else parse_at("--until", options.until)
    with _spark(options) as spark:
        found = stats(spark, _place(options), since=since, until=until)
        shown.put_stats(found, options.top, as_json=options.json)
    return OK


def _at(text: str | None) -> At:
    return LATEST if text is None else parse_at("--at", text, ends=False)


def _place(options: Namespace) -> str | Remote:
    if options.data is not None:
        data: str = options.data
        return data
    from delta_prop.spark.options import Remote

    link = link_of(options)
    return Remote(link.addresses, link.token, link.tls)


# --- Spark


@contextmanager
def _spark(options: Namespace) -> Iterator[SparkSession]:
    """A session for one verb. What fails on Spark is told in one line."""
    check_packages()
    check_java()
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    from delta_prop.spark.sessions import session

    progress = {"spark.ui.showConsoleProgress": str(on_terminal()).lower()}
    spark = session("delta-prop spark", master=options.master, settings=progress)
    try:
        yield spark
    except (PySparkException, Py4JError) as error:
        raise told(error) from error
    finally:
        spark.stop()


def told(error: Exception) -> DeltaPropError:
    """What failed on Spark, by what our own code said of it, if it was that."""
    text = str(error)
    ours = _OURS.findall(text)
    if ours:
        kind, message = ours[-1]
        return UsageError(message) if kind == "UsageError" else JobFailed(message)
    lines = [line.strip(" :") for line in text.splitlines() if line.strip(" :")]
    said = next(
        (line for line in lines if not line.startswith("An error occurred while")), type(error).__name__
    )
    return JobFailed(f"Spark: {_STATE.sub('', said):.500}")
