"""Warns when a service does not answer while a client keeps trying, and when it answers again.

A client may try for minutes; without the warning its program would seem to hang.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delta_prop.client.addresses import Address

logger = logging.getLogger("delta_prop.client.outage")

WARN_S = 3.0
"""Seconds without an answer after which a warning is logged."""


class Outage:
    """Warns once of each outage of a service."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._names = ", ".join(map(str, addresses))
        self._warned = False

    def on_silence(self, cause: Exception | None, since_s: float, left_s: float) -> None:
        """Note that no service has answered for `since_s`, and that retries continue for another `left_s`."""
        if not self._warned and since_s >= WARN_S:
            self._warned = True
            logger.warning(
                "%s: no answer for %.0f s (%s): trying for another %.0f s",
                self._names,
                since_s,
                str(cause) or type(cause).__name__,
                left_s,
            )

    def on_answer(self) -> None:
        """Note that a service has answered."""
        if self._warned:
            self._warned = False
            logger.warning("%s: answers again", self._names)
