"""Event loop on a thread of its own, for programs without one. System module: it owns a real thread."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import suppress

import anyio
from anyio.from_thread import BlockingPortal


class LoopThread:
    """Runs an event loop; other threads call into it through `portal`, until `stop`.

    Its thread is a daemon, as are those that the loop starts, so the interpreter runs its exit functions
    while the loop still runs, and one of them can stop it in order.
    """

    def __init__(self, backend: str) -> None:
        opened: Future[BlockingPortal] = Future()

        async def main() -> None:
            async with BlockingPortal() as portal:
                opened.set_result(portal)
                await portal.sleep_until_stopped()

        def run() -> None:
            try:
                anyio.run(main, backend=backend)
            except BaseException as error:
                if not opened.done():  # else the call that ended the loop raises the error
                    opened.set_exception(error)

        self._thread = threading.Thread(target=run, name="delta-prop loop", daemon=True)
        self._thread.start()
        self.portal = opened.result()
        self.ident = self._thread.ident

    @property
    def is_running(self) -> bool:
        """True while the thread runs; False in a fork of the process."""
        return self._thread.is_alive()

    def stop(self, *, cancel: bool = False) -> None:
        """Stop the loop, and wait for its end; `cancel`: cancel its tasks instead of letting them finish."""
        with suppress(RuntimeError):  # the loop has ended already
            self.portal.start_task_soon(self.portal.stop, cancel)
        self._thread.join()
