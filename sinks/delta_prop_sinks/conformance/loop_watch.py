"""Finds what holds up the event loop: in real time, whatever clock the loop goes by.

A call that never waits cannot be ended from outside, so a sink that blocks would just make the kit slow. A
thread looks where it stands meanwhile.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from contextlib import contextmanager
from math import inf
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from delta_prop_sinks.conformance.rules import NotConforming

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator, Iterator
    from types import FrameType, TracebackType

T = TypeVar("T")

HELD_S_MAX = 0.25
"""So long a stretch of a call, from one wait to the next, may keep the loop."""

HELD_MAX, CALLS = 3, 20
"""So many of so many calls: a busy machine stalls one now and then, a sink that blocks does it again."""

_LOOK_S = 0.02
_KIT = str(Path(__file__).parent)


class _Call(NamedTuple):
    what: str
    held_s: float
    place: str


class LoopWatch:
    """Measures each stretch of a sink's calls, and tells of those that are too long."""

    def __init__(self) -> None:
        self._loop = threading.get_ident()
        self._calls: deque[_Call] = deque(maxlen=CALLS)
        self._since = inf  # no stretch runs
        self._place = ""  # where the present one stood
        self._over = threading.Event()

    @contextmanager
    def running(self) -> Iterator[LoopWatch]:
        """Look where the calls stand that this thread makes."""
        thread = threading.Thread(target=self._look, name="conformance kit", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._over.set()
            thread.join()

    def begin(self, what: str) -> None:
        """Begin a call of the sink. Raises NotConforming where earlier ones have held up the loop."""
        held = [one for one in self._calls if one.held_s > HELD_S_MAX]
        if len(held) >= HELD_MAX:
            what_held, held_s, place = max(held, key=lambda one: one.held_s)
            raise NotConforming(
                "blocking",
                f"{what_held} held up the event loop for {held_s:.2f} s{place and f' at {place}'}, and "
                f"{len(held)} of {len(self._calls)} calls did so for more than {HELD_S_MAX:g} s",
            )
        self._calls.append(_Call(what, 0.0, ""))

    def __enter__(self) -> None:
        """Begin a stretch of the call."""
        self._place = ""
        self._since = perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        held_s, self._since = perf_counter() - self._since, inf
        if held_s > self._calls[-1].held_s:
            self._calls[-1] = _Call(self._calls[-1].what, held_s, self._place)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave out what stands for the work of a thread, which holds up nobody."""
        began, since, self._since = perf_counter(), self._since, inf
        try:
            yield
        finally:
            self._since = since + perf_counter() - began

    def _look(self) -> None:
        while not self._over.wait(_LOOK_S):
            since = self._since
            if perf_counter() - since > HELD_S_MAX / 2 and not self._place:
                place = _place_of(sys._current_frames().get(self._loop))
                if self._since == since:  # it stands there still
                    self._place = place


class InStretches(Generic[T]):
    """Awaits a call of a sink, each stretch of it watched. Shows where it waits, as a coroutine does."""

    def __init__(self, call: Coroutine[Any, Any, T], watch: LoopWatch) -> None:
        self._call = call
        self._watch = watch

    def __await__(self) -> Generator[Any, Any, T]:
        return self  # type: ignore[return-value]  # it has of a generator what `await` uses

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        """Go on, to the next wait."""
        with self._watch:
            return self._call.send(value)

    def throw(self, *failure: Any) -> Any:
        """Go on with a failure, to the next wait."""
        with self._watch:
            return self._call.throw(*failure)

    def close(self) -> None:
        """Give the call up."""
        self._call.close()

    @property
    def cr_frame(self) -> FrameType | None:
        """The call's frame."""
        return self._call.cr_frame  # type: ignore[attr-defined, no-any-return]

    @property
    def cr_await(self) -> object:
        """The awaitable that the call waits for."""
        return self._call.cr_await  # type: ignore[attr-defined]


def _place_of(frame: FrameType | None) -> str:
    """Return the line of the sink that the kit's call has come to; nothing where the kit itself runs."""
    found = ""
    while frame is not None and not frame.f_code.co_filename.startswith(_KIT):
        code = frame.f_code
        found = f"{Path(code.co_filename).name}:{frame.f_lineno} ({code.co_qualname})"
        frame = frame.f_back
    return found
