"""The interface of those that deliver the rows of a partition. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.delta import Head


class PartitionListener(Protocol):
    """Delivers the rows of a partition. Called on the partition's event loop; no call waits or raises."""

    def route(self, logged: LoggedBatch) -> None:
        """Take a batch that is visible from now on. Batches come in log order, each once."""

    def note_moved(self) -> None:
        """Note that the high watermark has moved; the batches below it were routed before."""

    def note_failed(self, refusal: Refused) -> None:
        """Note that the log has failed: rows that are not visible yet may be lost."""

    def note_recovered(self) -> None:
        """Note that the log was recovered in place, and may have another end; called in the same tick."""

    def note_restored(self) -> None:
        """Note that the state was restored from the recovered log, and that new rows are accepted again."""

    def load_head(self, namespace: str, vector_id: str) -> Head | None:
        """Return the head of a vector that the table of heads has dropped; None if there is none."""
