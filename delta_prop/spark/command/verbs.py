"""What the verbs of `delta-prop spark` do: a session, a job, and what it gives to people and programs."""

from __future__ import annotations

import math
import re
from collections import Counter
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from delta_prop.commands import edge
from delta_prop.commands.audit import (
    SHOWN,
    checked_target,
    mend,
    note_found,
    note_repaired,
    sink_name,
)
from delta_prop.commands.places import EARLIEST, LATEST, parse_at
from delta_prop.spark.command import shown
from delta_prop.spark.command.checking import (
    at_of,
    check_answers,
    check_directory,
    check_folder,
    check_output,
    check_tables,
    place_of,
    target_of,
)
from delta_prop.spark.command.spark_log import SparkLog
from delta_prop.spark.edge import on_terminal, root_log_dropped
from delta_prop.spark.java import check_java, check_packages
from delta_prop.spark.reach import job_of
from delta_prop_wire.delta import DEFAULT_NAMESPACE
from delta_prop_wire.errors import DeltaPropError, UsageError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

    from delta_prop.spark.options import Remote

OK, FAILED = 0, 1
_OURS = re.compile(r"^(?:delta_prop\w*\.)+(?:\w+\.)*(\w+): (.+)$", re.MULTILINE)
_WRONG_USE = ("PATH_NOT_FOUND", "PATH_ALREADY_EXISTS")
"""What Spark says of arguments that it alone can look at."""
_STATE = re.compile(r"\s*SQLSTATE: \w+\s*$")


class JobFailed(DeltaPropError):
    """A job failed on Spark; the message is what was said where it did."""


# --- tables


def run_diff(options: Namespace) -> int:
    """`diff`. Raises UsageError, JobFailed, and what reading the log raises."""
    if len(options.tables) != (2 if options.data is None else 1):
        wanted = "the old and the new one" if options.data is None else "the new one alone, beside --data"
        raise UsageError(f"tables named: {len(options.tables)}; name {wanted}")
    if not (options.threshold >= 0 and math.isfinite(options.threshold)):
        raise UsageError(f"--threshold {options.threshold!r}: give a number from 0 on")
    target = target_of(options)
    check_spark()
    check_tables(options.tables, options)
    check_output(options)
    check_answers(target)

    from delta_prop.spark.jobs.diffing import diff
    from delta_prop.spark.jobs.importing import read_table
    from delta_prop.spark.jobs.replaying import CONTENT, log_at, replayed

    log = None if options.data is None else log_at(str(place_of(options)))
    with _spark(options) as spark:
        *before, new = (read_table(spark, path, options.format) for path in options.tables)
        namespace = options.namespace
        if log is None:
            old = before[0]
        else:
            if namespace is None and "namespace" not in new.columns:
                namespace = DEFAULT_NAMESPACE
            old = _held(replayed(spark, log).where("alive").select(*CONTENT), options, namespace)
        vector, threshold = _vector(options.vector), options.threshold
        deltas = diff(old, new, key=options.key, vector=vector, namespace=namespace, threshold=threshold)
        _give_deltas(deltas, options, target)
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
    target = target_of(options)
    check_spark()
    check_tables([options.table], options)
    check_output(options)
    check_answers(target)

    from delta_prop.spark.jobs.importing import read_table, to_deltas

    with _spark(options) as spark:
        table = read_table(spark, options.table, options.format)
        vector, namespace = _vector(options.vector), options.namespace
        _give_deltas(to_deltas(table, key=options.key, vector=vector, namespace=namespace), options, target)
    return OK


def _vector(text: str) -> str | list[str]:
    names = [name.strip() for name in text.split(",")]
    return names if len(names) > 1 else text


def _give_deltas(deltas: DataFrame, options: Namespace, target: Remote | None) -> None:
    if target is None:
        shown.give(deltas, options.output, shown.delta_line)
        return
    from delta_prop.spark.jobs.importing import write_deltas
    from delta_prop.spark.source import register

    register(deltas.sparkSession)
    more: dict[str, Any] = {} if target.token is None else {"token": target.token}
    if target.tls is not None:
        tls = target.tls
        named = {"tlsCa": tls.authorities, "tlsName": tls.server_name}
        named |= {"tlsCertificate": tls.certificate, "tlsKey": tls.key}
        more |= {"tls": "true"} | {name: one for name, one in named.items() if one is not None}
    write_deltas(deltas, ",".join(target.addresses), options.producer, **more)
    if options.json:
        shown.put_job(options.producer, job_of(target, options.producer))


# --- the log


def run_replay(options: Namespace) -> int:
    """`replay`. Raises UsageError, JobFailed, and what reading the log raises."""
    at = at_of(options)
    check_spark()
    check_output(options)
    place = place_of(options)

    from delta_prop.spark.jobs.replaying import log_at, replayed

    log = log_at(place, at)
    with _spark(options) as spark:
        states = replayed(spark, log)
        states = states.where("alive") if options.alive else states
        if options.output is None and not options.json:
            shown.put_table(states.select("namespace", "vector_id", "alive", "vector", "metadata", "offset"))
        else:
            shown.give(states, options.output, shown.state_line)
    return OK


def run_rebuild(options: Namespace) -> int:
    """`rebuild`. Raises UsageError, JobFailed, and what reading the log raises."""
    at, progress = at_of(options), edge.Progress()
    check_spark()
    check_directory(options.data)
    check_folder("--storage", options.storage)

    from delta_prop.spark.jobs.rebuilding import check_replaced, log_to_rebuild, rebuilt
    from delta_prop_sinks.storage_file import FileFailed

    log = log_to_rebuild(options.data, at)
    try:
        check_replaced(options.storage, log, replace=options.replace)
        with _spark(options, progress) as spark:
            progress.tell("the log is read")
            made = rebuilt(
                spark,
                log,
                options.storage,
                replace=options.replace,
                tell=lambda rows: progress.tell(f"{rows:,} rows"),
            )
    except FileFailed as failure:
        raise JobFailed(str(failure)) from failure
    finally:
        progress.end()
    shown.put_rebuilt(options.storage, made, as_json=options.json)
    return OK


def run_audit(options: Namespace) -> int:
    """`audit --spark`. Raises UsageError, JobFailed, Refused, and what reading the log raises."""
    target, progress = checked_target(options), edge.Progress()
    check_spark()
    check_output(options)
    check_directory(options.data, writes=options.repair and target is None)
    name = sink_name(options)
    if options.contents is not None:
        check_tables([options.contents], options)

    from delta_prop.spark.jobs.auditing import audit, log_to_audit, reached_in, repairs
    from delta_prop.spark.jobs.importing import read_table

    log = log_to_audit(options.data)
    if options.storage is not None:
        reached_in(options.storage, options.data, log)  # or it is told what is wrong with the file
    with _spark(options, progress) as spark:
        progress.tell("the sink is compared with the log")
        sink = options.storage if options.contents is None else read_table(spark, options.contents)
        found = audit(spark, options.data, sink, come=options.come, name=name).localCheckpoint()
        kinds = found.groupBy("difference").count().collect()
        counts = Counter({row.difference: row["count"] for row in kinds})
        progress.end()
        if options.output is not None or options.json:
            shown.give(found, options.output, shown.difference_line)
        elif counts:
            shown.put_table(found.select(*SHOWN))
        note_found(counts)
        if not counts or not options.repair:
            return FAILED if counts else OK
        repaired = mend(repairs(found), options, target)
    return note_repaired(repaired, counts)


def run_stats(options: Namespace) -> int:
    """`stats`. Raises UsageError, JobFailed, and what reading the log raises."""
    since = EARLIEST if options.start is None else parse_at("--start", options.start, edge.wall_us())
    until = LATEST if options.until is None else parse_at("--until", options.until, edge.wall_us())
    check_spark()
    place = place_of(options)

    from delta_prop.spark.jobs.counting import counted, log_to_count

    log, sinks = log_to_count(place, since, until)
    with _spark(options) as spark:
        shown.put_stats(counted(spark, log, sinks), options.top, as_json=options.json)
    return OK


# --- Spark


def check_spark() -> None:
    """Whether Spark can start here. Raises UsageError with the line that cures it."""
    check_packages()
    check_java()


@contextmanager
def _spark(options: Namespace, progress: edge.Progress | None = None) -> Iterator[SparkSession]:
    """A session for one verb. What fails on Spark is told in one line. `progress`: of the verb; what stands
    there last is taken away when it ends.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    from delta_prop.spark.sessions import session

    settings = {"spark.ui.showConsoleProgress": str(on_terminal()).lower()}
    spark, log = None, SparkLog(shown=options.spark_log)
    # Both PySpark's handler of Ctrl-C and py4j log a traceback of the call that it breaks off.
    logged = nullcontext() if options.spark_log else root_log_dropped()
    progress = progress or edge.Progress()
    progress.tell("Spark is starting, which takes some seconds")
    with logged:
        try:
            with log.of_what_starts():
                spark = session("delta-prop spark", master=options.master, settings=settings)
            progress.end()
            yield spark
        except (PySparkException, Py4JError) as error:
            log.drain()
            raise told(error, log.last()) from error
        finally:
            progress.end()
            if spark is not None:
                spark.stop()
            log.drain()


def told(error: Exception, logged: str = "") -> DeltaPropError:
    """What failed on Spark, by what our own code said of it, if it was that. `logged`: the last line of its
    log, which alone says why it did not start.
    """
    text = str(error)
    if "[JAVA_GATEWAY_EXITED]" in text:
        return JobFailed(f"Spark did not start: {logged or text:.500}")
    ours = _OURS.findall(text)
    if ours:
        kind, message = ours[-1]
        return UsageError(message) if kind == "UsageError" else JobFailed(message)
    lines = [line.strip(" :") for line in text.splitlines() if line.strip(" :")]
    said = next(
        (line for line in lines if not line.startswith("An error occurred while")), type(error).__name__
    )
    wrong = any(f"[{one}]" in said for one in _WRONG_USE)
    return (UsageError if wrong else JobFailed)(f"Spark: {_STATE.sub('', said):.500}")
