"""What the verbs of `delta-prop spark` look at before Spark starts: arguments, files, a log, a service.

Every mistake is a UsageError that names the argument. Knows no Spark, and loads nothing of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.client.addresses import parse_addresses
from delta_prop.commands import edge as files
from delta_prop.commands.connecting import link_of
from delta_prop.commands.opened import open_disk
from delta_prop.commands.places import LATEST, name_fault, parse_at
from delta_prop.spark import edge
from delta_prop.spark.jobs.formats import format_of
from delta_prop.spark.option_values import PRODUCER_BYTES_MAX
from delta_prop.spark.options import Remote
from delta_prop.spark.reach import check_on_driver, check_publishes
from delta_prop_broker.log.files.names import LOCK_PATH
from delta_prop_wire.errors import UsageError
from delta_prop_wire.spec import NAMESPACE_BYTES_MAX

if TYPE_CHECKING:
    from argparse import Namespace

    from delta_prop.commands.places import At

_ARGUMENTS = {"tlsCa": "--tls-ca", "tlsCertificate": "--tls-certificate", "tlsKey": "--tls-key"}


def check_tables(paths: list[str], options: Namespace, kinds: str = "Parquet, CSV or JSON lines") -> None:
    """Check that tables are there, as far as they are files of this machine; how they are read and named.

    `kinds`: of which kinds they may be.
    """
    for path in paths:
        format_of(path, getattr(options, "format", None))
        here = _path_here(path, options.master)
        if here is not None and not any(letter in here for letter in "*?[{") and not edge.is_there(here):
            raise UsageError(f"no table at {path!r:.300}: name a file or a folder of {kinds}")
    namespace = getattr(options, "namespace", None)
    if namespace is not None and (fault := name_fault("--namespace", namespace, NAMESPACE_BYTES_MAX)):
        raise UsageError(fault)


def check_output(options: Namespace) -> None:
    """Whether the file of `--output` can be made, and none is there."""
    path: str | None = options.output
    if path is not None and path.endswith(".parquet"):
        path = _path_here(path, options.master)
    if path is None:
        return
    if edge.is_there(path):
        raise UsageError(f"--output: {path!r:.300} is there already, and is not overwritten: name a new file")
    check_folder("--output", path)


def _path_here(path: str, master: str) -> str | None:
    """Where Spark looks for a path on this machine; None: it looks elsewhere."""
    path = path.removeprefix("file://").removeprefix("file:")
    elsewhere = "://" in path or not master.startswith("local") or edge.setting("HADOOP_CONF_DIR")
    return None if elsewhere else path


def check_folder(option: str, path: str) -> None:
    """Whether a file of this name can be made."""
    fault = edge.folder_fault(path)
    if fault is not None:
        raise UsageError(f"{option}: {path!r:.300} cannot be made: {fault}")


def check_directory(data: str, *, writes: bool = False) -> None:
    """Whether a data directory is there. `writes`: and nobody else writes into it."""
    open_disk(data)
    holder = files.lock_holder(data, LOCK_PATH) if writes else None
    if holder is not None:
        raise UsageError(
            f"{data!r:.300} is in use by process {holder}: send the repair to that service with --to "
            "HOST:PORT, or stop it first"
        )


def place_of(options: Namespace) -> str | Remote:
    """A data directory that is there, or a service."""
    if options.data is not None:
        data: str = options.data
        check_directory(data)
        return data
    return remote_of(options, "--from")


def remote_of(options: Namespace, option: str) -> Remote:
    """The service that the arguments name, as far as it can be looked at without connecting."""
    link = link_of(options)
    try:
        addresses = tuple(map(str, parse_addresses(link.addresses)))
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None
    remote = Remote(addresses, link.token, link.tls)
    check_on_driver(remote, {"url": option, **_ARGUMENTS})
    return remote


def target_of(options: Namespace) -> Remote | None:
    """The service that deltas go to, as a job of a name; None: none is named."""
    if options.server is None:
        return None
    if not options.producer:
        raise UsageError(
            "--to: give the job a --producer too, under which it has one effect however often it runs"
        )
    if fault := name_fault("--producer", options.producer, PRODUCER_BYTES_MAX):
        raise UsageError(fault)
    return remote_of(options, "--to")


def check_answers(target: Remote | None) -> None:
    """Whether the service takes jobs. Raises Refused, Unreachable too."""
    if target is not None:
        check_publishes(target, stages=True)


def at_of(options: Namespace) -> At:
    """`--at`."""
    return LATEST if options.at is None else parse_at("--at", options.at, edge.wall_us(), ends=False)
