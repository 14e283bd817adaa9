"""Runs the verbs of `delta-prop spark`: a session, a job, and its output."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from delta_prop.commands import spark_output as output
from delta_prop.commands.audit import (
    REPORT_COLUMNS,
    apply_repair,
    find_repair_target,
    find_sink_name,
    note_differences,
    note_repair,
)
from delta_prop.commands.connect_options import read_position
from delta_prop.commands.spark_checks import (
    check_directory,
    check_folder,
    check_output,
    check_tables,
    check_takes_jobs,
    source_of,
    target_of,
)
from delta_prop.commands.spark_log import SparkLog
from delta_prop.directory.log_positions import EARLIEST, LATEST
from delta_prop.directory.readonly_log import PartitionName
from delta_prop.platform import system
from delta_prop.spark.java import check_java, check_packages
from delta_prop.spark.options import Remote
from delta_prop.spark.service_checks import query_job
from delta_prop.spark.system import is_on_terminal, root_log_dropped
from delta_prop_wire.delta import DEFAULT_NAMESPACE
from delta_prop_wire.errors import DeltaPropError, UsageError

if TYPE_CHECKING:
    from argparse import Namespace

    from pyspark.sql import DataFrame, SparkSession

OK, FAILED = 0, 1
_OWN_ERROR = re.compile(r"^(?:delta_prop\w*\.)+(?:\w+\.)*(\w+): (.+)$", re.MULTILINE)
_USAGE_ERRORS = ("PATH_NOT_FOUND", "PATH_ALREADY_EXISTS")
"""Spark's error classes for arguments that only Spark can check."""
_SQL_STATE = re.compile(r"\s*SQLSTATE: \w+\s*$")


class JobFailed(DeltaPropError):
    """A job failed on Spark; the message is that of the failed task."""


# --- tables


def run_diff(options: Namespace) -> int:
    """Run `diff`. Raises UsageError, JobFailed, and what reading the log raises."""
    if len(options.tables) != (2 if options.data is None else 1):
        expected = "the old and the new one" if options.data is None else "only the new one with --data"
        raise UsageError(f"tables: {len(options.tables)} given: name {expected}")
    if not (options.threshold >= 0 and math.isfinite(options.threshold)):
        raise UsageError(f"--threshold {options.threshold!r}: give a number from 0 on")
    target = target_of(options)
    check_spark()
    check_tables(options.tables, options)
    check_output(options)
    check_takes_jobs(target, options.stream)

    from delta_prop.spark.jobs.diffing import diff
    from delta_prop.spark.jobs.importing import read_table
    from delta_prop.spark.jobs.replaying import CONTENT, logs_at, replay_logs

    name = PartitionName(options.stream)
    logs = None if options.data is None else logs_at(str(source_of(options)), name=name)
    with _open_session(options) as spark:
        *old_tables, new = (read_table(spark, path, options.format) for path in options.tables)
        namespace = options.namespace
        if logs is None:
            old = old_tables[0]
        else:
            if namespace is None and "namespace" not in new.columns:
                namespace = DEFAULT_NAMESPACE
            old = _log_table(replay_logs(spark, logs).where("alive").select(*CONTENT), options, namespace)
        vector, threshold = _parse_vector(options.vector), options.threshold
        deltas = diff(old, new, key=options.key, vector=vector, namespace=namespace, threshold=threshold)
        _output_deltas(deltas, options, target)
    return OK


def _log_table(states: DataFrame, options: Namespace, namespace: str | None) -> DataFrame:
    """Return the states of a log under the new table's column names.

    `namespace`: return only the states in it, without the column.
    """
    if not isinstance(_parse_vector(options.vector), str):
        raise UsageError(
            "--vector names several columns, but the log has one vector: combine the table's columns into one"
        )
    if namespace is not None:
        states = states.where(states.namespace == namespace).drop("namespace")
    return states.withColumnsRenamed({"vector_id": options.key, "vector": options.vector})


def run_import(options: Namespace) -> int:
    """Run `import`. Raises UsageError, JobFailed."""
    target = target_of(options)
    check_spark()
    check_tables([options.table], options)
    check_output(options)
    check_takes_jobs(target, options.stream)

    from delta_prop.spark.jobs.importing import read_table, to_deltas

    with _open_session(options) as spark:
        table = read_table(spark, options.table, options.format)
        vector, namespace = _parse_vector(options.vector), options.namespace
        _output_deltas(to_deltas(table, key=options.key, vector=vector, namespace=namespace), options, target)
    return OK


def _parse_vector(text: str) -> str | list[str]:
    names = [name.strip() for name in text.split(",")]
    return names if len(names) > 1 else text


def _output_deltas(deltas: DataFrame, options: Namespace, target: Remote | None) -> None:
    if target is None:
        output.write_rows(deltas, options.output, output.to_delta_line)
        return
    from delta_prop.spark.data_source.source import register
    from delta_prop.spark.jobs.importing import write_deltas

    register(deltas.sparkSession)
    extra: dict[str, Any] = {} if target.token is None else {"token": target.token}
    if target.tls is not None:
        tls = target.tls
        texts = {"tlsCa": tls.authorities, "tlsName": tls.server_name}
        texts |= {"tlsCertificate": tls.certificate, "tlsKey": tls.key}
        extra |= {"tls": "true"} | {name: one for name, one in texts.items() if one is not None}
    extra["stream"] = options.stream
    write_deltas(deltas, ",".join(target.addresses), options.producer, **extra)
    if options.json:
        output.put_job(options.producer, query_job(target, options.producer, options.stream))


# --- the log


def run_replay(options: Namespace) -> int:
    """Run `replay`. Raises UsageError, JobFailed, and what reading the log raises."""
    at = read_position("--at", options.at, LATEST, allow_ends=False)
    check_spark()
    check_output(options)
    source = source_of(options)

    from delta_prop.spark.jobs.replaying import logs_at, replay_logs

    logs = logs_at(source, at, PartitionName(options.stream, options.partition))
    with _open_session(options) as spark:
        states = replay_logs(spark, logs)
        states = states.where("alive") if options.alive else states
        if options.output is None and not options.json:
            output.put_table(states.select("namespace", "vector_id", "alive", "vector", "metadata", "offset"))
        else:
            output.write_rows(states, options.output, output.to_state_line)
    return OK


def run_rebuild(options: Namespace) -> int:
    """Run `rebuild`. Raises UsageError, JobFailed, and what reading the log raises."""
    at, progress = read_position("--at", options.at, LATEST, allow_ends=False), system.Progress()
    check_spark()
    check_directory(options.data)
    check_folder("--storage", options.storage)

    from delta_prop.spark.jobs.rebuilding import check_replaceable, log_to_rebuild, rebuild_from
    from delta_prop_sinks.storage_file import StorageFileError

    log = log_to_rebuild(options.data, at, PartitionName(options.stream, options.partition))
    try:
        check_replaceable(options.storage, log, replace=options.replace)
        with _open_session(options, progress) as spark:
            progress.report("reading the log")
            result = rebuild_from(
                spark,
                log,
                options.storage,
                replace=options.replace,
                report=lambda rows: progress.report(f"{rows:,} rows"),
            )
    except StorageFileError as failure:
        raise JobFailed(str(failure)) from failure
    finally:
        progress.end()
    output.put_rebuilt(options.storage, result, as_json=options.json)
    return OK


def run_audit(options: Namespace) -> int:
    """Run `audit --spark`. Raises UsageError, JobFailed, Refused, and what reading the log raises."""
    target, progress = find_repair_target(options), system.Progress()
    check_spark()
    check_output(options)
    check_directory(options.data, writes=options.repair and target is None)
    name = find_sink_name(options)
    if options.contents is not None:
        check_tables([options.contents], options)

    from delta_prop.spark.jobs.auditing import audit, log_to_audit, repairs, sink_offset_in
    from delta_prop.spark.jobs.importing import read_table

    log = log_to_audit(options.data)
    if options.storage is not None:
        sink_offset_in(options.storage, options.data, log)  # raises if the file is not valid
    with _open_session(options, progress) as spark:
        progress.report("the sink is compared with the log")
        sink = options.storage if options.contents is None else read_table(spark, options.contents)
        differences = audit(spark, options.data, sink, next_offset=options.next_offset, name=name)
        differences = differences.localCheckpoint()
        kinds = differences.groupBy("difference").count().collect()
        counts = Counter({row.difference: row["count"] for row in kinds})
        progress.end()
        if options.output is not None or options.json:
            output.write_rows(differences, options.output, output.to_difference_line)
        elif counts:
            output.put_table(differences.select(*REPORT_COLUMNS))
        note_differences(counts)
        if not counts or not options.repair:
            return FAILED if counts else OK
        repaired = apply_repair(repairs(differences), options, target)
    return note_repair(repaired, counts)


def run_stats(options: Namespace) -> int:
    """Run `stats`. Raises UsageError, JobFailed, and what reading the log raises."""
    start = read_position("--start", options.start, EARLIEST)
    until = read_position("--until", options.until, LATEST)
    check_spark()
    source = source_of(options)

    from delta_prop.spark.jobs.counting import count_logs, open_logs_for_counting

    name = PartitionName(options.stream, options.partition)
    logs, sinks = open_logs_for_counting(source, start, until, name)
    with _open_session(options) as spark:
        output.put_stats(count_logs(spark, logs, sinks), options.top, as_json=options.json)
    return OK


# --- Spark


def check_spark() -> None:
    """Check that Spark can start here. Raises UsageError with the command that makes it possible."""
    check_packages()
    check_java()


@contextmanager
def _open_session(options: Namespace, progress: system.Progress | None = None) -> Iterator[SparkSession]:
    """Open a session for one verb; turn an error on Spark into one line.

    `progress`: the verb's progress line, which is cleared at the end.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    from delta_prop.spark.data_source.sessions import session

    settings = {"spark.ui.showConsoleProgress": str(is_on_terminal()).lower()}
    spark, log = None, SparkLog(shown=options.spark_log)
    # On Ctrl-C, PySpark and py4j log tracebacks of the interrupted call to the root logger.
    root_log = nullcontext() if options.spark_log else root_log_dropped()
    progress = progress or system.Progress()
    progress.report("Spark is starting, which takes some seconds")
    with root_log:
        try:
            with log.capture():
                spark = session("delta-prop spark", master=options.master, settings=settings)
            progress.end()
            yield spark
        except (PySparkException, Py4JError) as error:
            log.drain()
            if _was_interrupted(error):
                raise KeyboardInterrupt from error
            raise translate_error(error, log.last_line()) from error
        finally:
            progress.end()
            if spark is not None:
                spark.stop()
            log.drain()


def _was_interrupted(error: BaseException) -> bool:
    """True if Ctrl-C led to the error: py4j then cleans up its connection, which may fail in its turn."""
    context = error.__context__
    return isinstance(context, KeyboardInterrupt) or (context is not None and _was_interrupted(context))


def translate_error(error: Exception, logged: str = "") -> DeltaPropError:
    """Return the error to raise for a failure on Spark: if possible, the error of delta-prop's own code.

    `logged`: the last line of Spark's log, which alone has the reason if Spark did not start.
    """
    text = str(error)
    if "[JAVA_GATEWAY_EXITED]" in text:
        return JobFailed(f"Spark did not start: {logged or text:.500}")
    ours = _OWN_ERROR.findall(text)
    if ours:
        kind, message = ours[-1]
        return UsageError(message) if kind == "UsageError" else JobFailed(message)
    lines = filter(None, (line.strip(" :") for line in text.splitlines()))
    own_lines = (line for line in lines if not line.startswith("An error occurred while"))
    reason = next(own_lines, type(error).__name__)
    is_usage_error = any(f"[{one}]" in reason for one in _USAGE_ERRORS)
    return (UsageError if is_usage_error else JobFailed)(f"Spark: {_SQL_STATE.sub('', reason):.500}")


VERBS = {
    "diff": run_diff,
    "import": run_import,
    "replay": run_replay,
    "rebuild": run_rebuild,
    "stats": run_stats,
}
