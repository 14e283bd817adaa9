"""Stores for how long processes have had a log open, and warns of jumps of the wall clock."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from delta_prop.platform.dates import format_time

if TYPE_CHECKING:
    from delta_prop.platform.ports import Threads
    from delta_prop_broker.log.durable import DurableLog

logger = logging.getLogger("delta_prop")

WRITE_S_MAX = 600.0
"""Maximum seconds between two writes of the times."""
WRITTEN_SHARE = 0.001
"""Share of the retention time after which the times are written: a crash loses up to that."""


class LogTimes:
    """Stores the clock of one log. Create it once the log is open, on the event loop."""

    def __init__(self, log: DurableLog) -> None:
        self._log = log
        self._interval_us = min(WRITE_S_MAX, log.settings.delta_retention_s * WRITTEN_SHARE) * 1e6
        self._written_us = log.clock.seen_us
        self._jumps_written = self._jumps_reported = 0
        log.clock.read()
        self.report()

    def report(self) -> None:
        """Log a warning if the wall clock has jumped since the last call."""
        clock = self._log.clock
        if clock.jumps == self._jumps_reported or clock.jump is None:
            return
        self._jumps_reported = clock.jumps
        logger.warning(
            "the clock shows %s, but %s was expected: it was set, or the log was closed meanwhile; deltas "
            "age only while a process has the log open",
            format_time(clock.jump.found_us), format_time(clock.jump.expected_us),
        )  # fmt: skip

    async def store(self, threads: Threads) -> None:
        """Report jumps, and write the times if they are due; after a disk error the next call retries."""
        self.report()
        log, jumps = self._log, self._log.clock.jumps
        is_due = log.clock.seen_us - self._written_us >= self._interval_us or jumps != self._jumps_written
        if is_due and log.failure is None:
            times = log.times()
            try:
                await threads.run(partial(log.write_times, times))
            except OSError as error:
                logger.warning("the log's times could not be written; the service retries: %s", error)
            else:
                self._written_us, self._jumps_written = times.seen_us, jumps
