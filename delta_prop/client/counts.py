"""Counters of a producer. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """Counts since the producer was created.

    `batches`, `deltas`: sent at least once. `resent`: batches sent more than once. `acknowledged`, `refused`:
    deltas by their outcome. `lost`: deltas that were acknowledged and that the service has lost since, as
    their ack level allowed.
    """

    batches: int = 0
    deltas: int = 0
    resent: int = 0
    acknowledged: int = 0
    refused: int = 0
    lost: int = 0
