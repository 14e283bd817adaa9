"""How a client's tasks end: what the program raised, or what a task failed with, comes out as itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from contextlib import AsyncExitStack


async def end_tasks(exits: AsyncExitStack, error: BaseException | None) -> None:
    """End the task group of a client, which ends for `error`. Raises the failure of a task, without a group.

    The program's own exception goes on as it is; handed to the task group it would come out in a group.
    """
    cancelled = isinstance(error, anyio.get_cancelled_exc_class())
    failure: BaseException | None = None
    try:
        await exits.__aexit__(*((type(error), error, None) if cancelled else (None, None, None)))
    except BaseExceptionGroup as group:
        failure = _only(group)
    if failure is not None:
        raise failure


def _only(group: BaseException) -> BaseException:
    """The one exception in a group; a group of several as it is."""
    while isinstance(group, BaseExceptionGroup) and len(group.exceptions) == 1:
        group = group.exceptions[0]
    return group
