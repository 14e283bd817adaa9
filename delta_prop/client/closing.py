"""Ends a client's tasks; raises the program's exception, or a task's failure, without a group around it."""

from __future__ import annotations

from contextlib import AsyncExitStack

import anyio


async def close_tasks(exits: AsyncExitStack, error: BaseException | None) -> None:
    """End the task group of a client. `error`: the program's exception that ends the client, if any.

    Raises the failure of a task, unwrapped. The program's own exception propagates unchanged; a task group
    would wrap it in an exception group.
    """
    cancelled = isinstance(error, anyio.get_cancelled_exc_class())
    failure: BaseException | None = None
    try:
        await exits.__aexit__(*((type(error), error, None) if cancelled else (None, None, None)))
    except BaseExceptionGroup as group:
        failure = _unwrap(group)
    if failure is not None:
        raise failure


def _unwrap(group: BaseException) -> BaseException:
    """Return the only exception of a group; a group of several unchanged."""
    while isinstance(group, BaseExceptionGroup) and len(group.exceptions) == 1:
        group = group.exceptions[0]
    return group
