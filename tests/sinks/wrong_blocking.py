"""Sinks that block the event loop: for each, the check of the kit that fails, and a part of its message."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.sinks.correct_sinks import Plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop_sinks import Delivery, ResumePoint, SinkContext


def wait_for_the_target() -> None:
    """Block like a call over a network."""
    time.sleep(0.3)


class SleepsNowAndThen(Plain):
    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        await super().apply(deliveries)
        if self.calls % 3 == 0:
            wait_for_the_target()


class SleepsWhenOpened(Plain):
    async def open(self, context: SinkContext) -> ResumePoint | None:
        wait_for_the_target()
        return await super().open(context)


WRONG: tuple[tuple[type[Plain], str, str], ...] = (
    (SleepsNowAndThen, "blocking", " (SleepsNowAndThen.apply), and 3 of "),
    (SleepsWhenOpened, "blocking", " (SleepsWhenOpened.open), and 3 of "),
)
