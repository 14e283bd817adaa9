"""What the opening of a log found and did: for whoever goes on from it, and for people.

Made by `recovery.py`; nothing here looks at a file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delta_prop_broker.log.files.checkpoints import Checkpoints
    from delta_prop_broker.log.files.identity import Identity
    from delta_prop_broker.log.files.marks import MarkFile
    from delta_prop_broker.log.files.segment import Segments


@dataclass(frozen=True, slots=True)
class Cut:
    """A torn tail that was taken away (or, read-only, is not shown): it was above the synced mark."""

    path: str
    position: int
    bytes: int
    offset: int
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.bytes} bytes from byte {self.position} on (offset {self.offset} and above) "
            f"were never synced and are cut: {self.reason}"
        )


@dataclass(slots=True)
class RecoveryReport:
    """What opening found and did. Sizes in bytes."""

    read_only: bool = False
    created: bool = False
    clean: bool = False
    epoch: int = 0
    first_offset: int = 0
    next_offset: int = 0
    synced: int = 0  # what was known to be on stable storage before this
    segments: int = 0
    bytes: int = 0
    walked_bytes: int = 0
    indexes_rebuilt: int = 0
    checkpoint: int | None = None  # the offset of the newest one that fits
    cut: Cut | None = None
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        state = "new" if self.created else "closed cleanly" if self.clean else "not closed cleanly"
        lines = [
            f"log {state}: offsets {self.first_offset} to {self.next_offset}, epoch {self.epoch}, "
            f"{self.segments} segments of {self.bytes} bytes, {self.walked_bytes} read; "
            f"synced up to {self.synced}",
            *([] if self.checkpoint is None else [f"checkpoint at offset {self.checkpoint}"]),
            *([] if self.cut is None else [str(self.cut)]),
            *self.notes,
        ]
        return "\n".join(lines)


@dataclass(slots=True)
class Recovered:
    """What a log goes on from."""

    identity: Identity
    segments: Segments
    chain: int | None  # the last stamp's checksum, None where no frame is there
    start: int
    next_offset: int
    synced: int
    mark: MarkFile | None  # None: read-only
    checkpoints: Checkpoints
    report: RecoveryReport

    def close(self) -> None:
        """Let go of its files: nobody goes on from it."""
        self.segments.close()
        if self.mark is not None:
            self.mark.close()
