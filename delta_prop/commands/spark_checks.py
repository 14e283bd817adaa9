"""Checks of the verbs of `delta-prop spark` before Spark starts: arguments, files, a log, a service.

Every mistake is a UsageError that names the argument. The module does not load Spark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.client.addresses import parse_addresses
from delta_prop.client.partition_choice import DEFAULT_STREAM
from delta_prop.commands.connect_options import connect_options_of
from delta_prop.directory.log_positions import check_name_argument
from delta_prop.directory.readonly_log import open_disk
from delta_prop.platform import system as files
from delta_prop.spark import system
from delta_prop.spark.arguments import format_of
from delta_prop.spark.option_values import PRODUCER_BYTES_MAX
from delta_prop.spark.options import Remote
from delta_prop.spark.served_streams import find_served_stream
from delta_prop.spark.service_checks import check_on_driver, check_publishes
from delta_prop_broker.segments.paths import LOCK_PATH
from delta_prop_wire.errors import UsageError
from delta_prop_wire.spec import NAMESPACE_BYTES_MAX

if TYPE_CHECKING:
    from argparse import Namespace

_ARGUMENT_NAMES = {"tlsCa": "--tls-ca", "tlsCertificate": "--tls-certificate", "tlsKey": "--tls-key"}


def check_tables(paths: list[str], options: Namespace, formats: str = "Parquet, CSV or JSON lines") -> None:
    """Check the format of each table, the namespace, and that tables on this machine exist.

    `formats`: the accepted formats as text, for messages. Raises UsageError.
    """
    for path in paths:
        format_of(path, getattr(options, "format", None))
        local_path = _local_path(path, options.master)
        is_pattern = local_path is None or any(letter in local_path for letter in "*?[{")
        if local_path is not None and not is_pattern and not system.path_exists(local_path):
            raise UsageError(f"table {path!r:.300} does not exist: name a file or a folder of {formats}")
    namespace = getattr(options, "namespace", None)
    if namespace is not None:
        check_name_argument("--namespace", namespace, NAMESPACE_BYTES_MAX)


def check_output(options: Namespace) -> None:
    """Check that the file of `--output` can be created, and does not exist. Raises UsageError."""
    path: str | None = options.output
    if path is not None and path.endswith(".parquet"):
        path = _local_path(path, options.master)
    if path is None:
        return
    if system.path_exists(path):
        raise UsageError(f"--output {path!r:.300}: it exists and is not overwritten: name a new file")
    check_folder("--output", path)


def _local_path(path: str, master: str) -> str | None:
    """Return the path on this machine that Spark would use, None if Spark uses another machine's files."""
    path = path.removeprefix("file://").removeprefix("file:")
    is_elsewhere = "://" in path or not master.startswith("local") or system.read_variable("HADOOP_CONF_DIR")
    return None if is_elsewhere else path


def check_folder(option: str, path: str) -> None:
    """Check that a file can be created at the path. Raises UsageError."""
    fault = system.find_folder_fault(path)
    if fault is not None:
        raise UsageError(f"{option} {path!r:.300} cannot be created ({fault}): name another path")


def check_directory(data: str, *, writes: bool = False) -> None:
    """Check that a data directory exists and, if the verb `writes` to it, that no process has it open.

    Raises UsageError.
    """
    open_disk(data)
    holder = files.find_lock_holder(data, LOCK_PATH) if writes else None
    if holder is not None:
        raise UsageError(
            f"{data!r:.300} is in use by process {holder}: send the repair to that service with --to "
            "HOST:PORT, or stop it first"
        )


def source_of(options: Namespace) -> str | Remote:
    """Return an existing data directory, or a service. Raises UsageError."""
    if options.data is not None:
        data: str = options.data
        check_directory(data)
        return data
    return remote_of(options, "--from")


def remote_of(options: Namespace, option: str) -> Remote:
    """Return the service that the arguments name, checked without connecting. Raises UsageError."""
    connection = connect_options_of(options)
    try:
        addresses = tuple(map(str, parse_addresses(connection.addresses)))
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None
    remote = Remote(addresses, connection.token, connection.tls)
    check_on_driver(remote, {"url": option, **_ARGUMENT_NAMES})
    return remote


def target_of(options: Namespace) -> Remote | None:
    """Return the service that deltas are sent to, None if none is named. Raises UsageError."""
    if options.server is None:
        if options.stream != DEFAULT_STREAM and getattr(options, "data", None) is None:
            raise UsageError(f"--stream {options.stream!r:.80}: nothing is sent or read there: give --to too")
        return None
    if not options.producer:
        raise UsageError(
            "--to: give --producer too, a job name under which a repeated run has no further effect"
        )
    check_name_argument("--producer", options.producer, PRODUCER_BYTES_MAX)
    return remote_of(options, "--to")


def check_takes_jobs(target: Remote | None, stream: str) -> None:
    """Check that the service, if one is named, accepts jobs in a stream.

    Raises UsageError, Refused, Unreachable.
    """
    if target is not None:
        check_publishes(target, find_served_stream(target, stream).log_name(0), stages=True)
