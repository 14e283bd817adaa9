"""Migration of golden directories of an earlier format, for other tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_broker.recovery.migration import MigrationCallbacks, MigrationPlan, MigrationReport, migrate
from delta_prop_simulations.disk import SimDisk
from tests.broker.durable import FixedRandomness

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delta_prop_broker.disk import Disk


def disk_of(files: Mapping[str, bytes]) -> SimDisk:
    """Return a disk that holds these files."""
    disk = SimDisk()
    for path, content in files.items():
        disk.put(path, content)
    return disk


def migrate_disk(disk: Disk, plans: list[MigrationPlan] | None = None) -> MigrationReport:
    """Migrate the directory on a disk."""
    collected = [] if plans is None else plans
    callbacks = MigrationCallbacks(collected.append, lambda done, total: None, lambda line: None)
    return migrate(disk, randomness=FixedRandomness(), callbacks=callbacks)


def migrate_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files of a directory after its migration."""
    disk = disk_of(files)
    migrate_disk(disk)
    return {path: disk.peek(path) for path in disk.paths() if path != "lock"}
