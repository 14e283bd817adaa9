"""The result of a recovery: the state that a log continues from, and a report for people.

`recovery.py` creates it; nothing here reads a file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delta_prop_broker.recovery.checkpoints import Checkpoints
    from delta_prop_broker.recovery.recovery_point import RecoveryPointFile
    from delta_prop_broker.segments.identity import Identity
    from delta_prop_broker.segments.segment import Segments


@dataclass(frozen=True, slots=True)
class TruncatedTail:
    """A torn tail, after all rows known to be synced: truncated, or hidden if the log is read-only.

    `bytes`: its size; it starts at `position` of the file `path`. `offset`: of its first row.
    """

    path: str
    position: int
    bytes: int
    offset: int
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.bytes} bytes from byte {self.position} on (offset {self.offset} and above) "
            f"were never synced and are left out: {self.reason}"
        )


@dataclass(slots=True)
class RecoveryReport:
    """The findings and actions of an opening.

    `created`: the log is new. `clean`: it was closed cleanly. `segments`: their number; `bytes`: their size,
    of which `scanned_bytes` were read. `notes`: messages about files that are not used.
    """

    read_only: bool = False
    created: bool = False
    clean: bool = False
    epoch: int = 0
    start_offset: int = 0
    next_offset: int = 0
    synced: int = 0  # the offset up to which rows were known to be synced before the recovery
    segments: int = 0
    bytes: int = 0
    scanned_bytes: int = 0
    indexes_rebuilt: int = 0
    checkpoint: int | None = None  # the offset of the newest checkpoint that fits
    truncated_tail: TruncatedTail | None = None
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        state = "new" if self.created else "closed cleanly" if self.clean else "not closed cleanly"
        lines = [
            f"log {state}: offsets {self.start_offset} to {self.next_offset}, epoch {self.epoch}, "
            f"{self.segments} segments of {self.bytes} bytes, {self.scanned_bytes} read; "
            f"synced up to {self.synced}",
            *([] if self.checkpoint is None else [f"checkpoint at offset {self.checkpoint}"]),
            *([] if self.truncated_tail is None else [str(self.truncated_tail)]),
            *self.notes,
        ]
        return "\n".join(lines)


@dataclass(slots=True)
class RecoveryResult:
    """The state that a log continues from."""

    identity: Identity
    segments: Segments
    chain_crc: int | None  # the last stamp's checksum; None if there is no frame
    start: int  # offset of the first row
    next_offset: int
    synced: int  # offset up to which rows are synced
    recovery_point: RecoveryPointFile | None  # None if the log is read-only
    checkpoints: Checkpoints
    report: RecoveryReport

    def close(self) -> None:
        """Close the files; only for a result that no log continues from."""
        self.segments.close()
        if self.recovery_point is not None:
            self.recovery_point.close()
