"""Detects calls that block the event loop, in real time, whatever clock the loop uses.

A call that never waits cannot be ended from outside, and a sink that blocks would otherwise only make the kit
slow. A thread samples the line that the loop runs.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from time import perf_counter
from types import FrameType, TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

from delta_prop_sinks.conformance.rules import ContractViolation

T = TypeVar("T")

BLOCKED_S_MAX = 0.25
"""Maximum time that a step of a call, from one wait to the next, may block the loop."""

BLOCKED_MAX, WATCHED_CALLS = 3, 20
"""A sink violates the contract if BLOCKED_MAX of its last WATCHED_CALLS calls have blocked the loop; a busy
machine may stall one or two."""

_POLL_S = 0.02
_KIT = str(Path(__file__).parent)


class _Call(NamedTuple):
    """The longest step of a call, and the line that ran; "" if that is unknown."""

    name: str
    blocked_s: float
    line: str


class LoopWatch:
    """Measures each step of a sink's calls, and reports those that are too long."""

    def __init__(self) -> None:
        self._loop_thread = threading.get_ident()
        self._calls: deque[_Call] = deque(maxlen=WATCHED_CALLS)
        self._since = inf  # the start of the present step; inf while none runs
        self._line = ""  # the position of the present step, once it is slow
        self._stop_event = threading.Event()

    @contextmanager
    def run(self) -> Iterator[LoopWatch]:
        """Sample the calls that this thread makes."""
        thread = threading.Thread(target=self._poll, name="conformance kit", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stop_event.set()
            thread.join()

    def begin(self, name: str) -> None:
        """Begin a call of the sink. Raises ContractViolation if earlier calls have blocked the loop."""
        blocked = [call for call in self._calls if call.blocked_s > BLOCKED_S_MAX]
        if len(blocked) >= BLOCKED_MAX:
            longest, blocked_s, line = max(blocked, key=lambda call: call.blocked_s)
            raise ContractViolation(
                "blocking",
                f"{longest} blocked the event loop for {blocked_s:.2f} s{line and f' at {line}'}, and "
                f"{len(blocked)} of {len(self._calls)} calls did so for more than {BLOCKED_S_MAX:g} s",
            )
        self._calls.append(_Call(name, 0.0, ""))

    def __enter__(self) -> None:
        self._line = ""
        self._since = perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        blocked_s, self._since = perf_counter() - self._since, inf
        if blocked_s > self._calls[-1].blocked_s:
            self._calls[-1] = _Call(self._calls[-1].name, blocked_s, self._line)

    @contextmanager
    def exclude(self) -> Iterator[None]:
        """Exclude a call that simulates the work of a thread, which would not block the loop."""
        started, since, self._since = perf_counter(), self._since, inf
        try:
            yield
        finally:
            self._since = since + perf_counter() - started

    def _poll(self) -> None:
        while not self._stop_event.wait(_POLL_S):
            since = self._since
            if perf_counter() - since > BLOCKED_S_MAX / 2 and not self._line:
                line = _line_of(sys._current_frames().get(self._loop_thread))
                if self._since == since:  # still in the same step
                    self._line = line


class WatchedCall(Generic[T]):
    """Awaits a sink's call and watches each step. Exposes the awaitable that it waits for, as a coroutine
    does.
    """

    def __init__(self, call: Coroutine[Any, Any, T], watch: LoopWatch) -> None:
        self._call = call
        self._watch = watch

    def __await__(self) -> Generator[Any, Any, T]:
        return self  # type: ignore[return-value]  # it has the generator methods that `await` uses

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        """Continue to the next wait."""
        with self._watch:
            return self._call.send(value)

    def throw(self, *failure: Any) -> Any:
        """Continue with a failure, to the next wait."""
        with self._watch:
            return self._call.throw(*failure)

    def close(self) -> None:
        """Close the call."""
        self._call.close()

    @property
    def cr_frame(self) -> FrameType | None:
        """The call's frame."""
        return self._call.cr_frame  # type: ignore[attr-defined, no-any-return]

    @property
    def cr_await(self) -> object:
        """The awaitable that the call waits for."""
        return self._call.cr_await  # type: ignore[attr-defined]


def _line_of(frame: FrameType | None) -> str:
    """Return the sink's line that runs, called by the kit; "" if the kit itself runs."""
    line = ""
    while frame is not None and not frame.f_code.co_filename.startswith(_KIT):
        code = frame.f_code
        line = f"{Path(code.co_filename).name}:{frame.f_lineno} ({code.co_qualname})"
        frame = frame.f_back
    return line
