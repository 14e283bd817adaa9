"""Golden directories of an earlier format, migrated, for those who go on with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_broker.log.migration import MigrationCallbacks, MigrationPlan, MigrationReport, migrate
from delta_prop_simulations.disk import SimDisk

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delta_prop_broker.disk import Disk


def disk_of(files: Mapping[str, bytes]) -> SimDisk:
    """A disk that holds these files."""
    disk = SimDisk()
    for path, content in files.items():
        disk.put(path, content)
    return disk


def migrate_disk(disk: Disk, plans: list[MigrationPlan] | None = None) -> MigrationReport:
    """Migrate what is on a disk."""
    told = [] if plans is None else plans
    watching = MigrationCallbacks(told.append, lambda done, total: None, lambda line: None)
    return migrate(disk, draw=lambda size: bytes(range(size)), callbacks=watching)


def migrated(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of a directory after its migration."""
    disk = disk_of(files)
    migrate_disk(disk)
    return {path: disk.peek(path) for path in disk.paths() if path != "lock"}
