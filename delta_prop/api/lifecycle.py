"""State of a propagator between its opening and its end, and the check that every call begins with."""

from __future__ import annotations

from delta_prop.platform.world import this_thread
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode


class Lifecycle:
    """State of a propagator: not open, open on one thread, closing."""

    def __init__(self) -> None:
        self._thread_id = 0
        """Id of the event loop's thread while the propagator is open; else 0."""
        self._is_closing = False

    @property
    def is_open(self) -> bool:
        """True from the opening until the propagator begins to close."""
        return self._thread_id != 0

    def begin(self) -> None:
        """Accept calls of this thread."""
        self._thread_id = this_thread()

    def begin_close(self) -> None:
        """Refuse calls with SHUTTING_DOWN."""
        self._thread_id, self._is_closing = 0, True

    def end_close(self) -> None:
        """Reject calls until the next opening."""
        self._is_closing = False

    def check(self) -> None:
        """Raise Refused (SHUTTING_DOWN) or UsageError unless calls of this thread are accepted."""
        if this_thread() == self._thread_id:  # one comparison, since every call makes this check
            return
        if self._is_closing:
            raise Refused(
                ErrorCode.SHUTTING_DOWN,
                "the propagator is closing: publish before the `async with` ends, or in the next one",
                retry_after_ms=1000,
            )
        if not self._thread_id:
            raise UsageError("the propagator is not open: use it inside `async with Propagator() as p:`")
        raise UsageError(
            "the propagator was called from another thread than that of its event loop: use SyncPropagator, "
            "or anyio.from_thread.run(p.publish, delta) in a thread that anyio started"
        )
