"""Traces the calls that a delta passes, and counts their stations.

A function is a *station* if it is entered from another file with the delta, and hands it to a further file.
The delta is whatever stands for it: the object of the caller, a draft, a batch, a frame, a run of frames, the
bytes from the socket, the receipt. The way ends at a sink's `apply`. A call is *backward* if its target is in
a file that waits for this call to return.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, FrameType

_ROOT = f"{Path(__file__).resolve().parent.parent}/"
_SOURCES = tuple(_ROOT + folder for folder in ("delta_prop/", "broker/", "sinks/", "wire/"))
_NOT_TRACED = tuple(_ROOT + folder for folder in ("delta_prop/testing/", "delta_prop/client/"))
_CARRIERS = {
    "Ack",
    "Batch",
    "BatchFrame",
    "CoalescedDraft",
    "Delivery",
    "Delta",
    "Draft",
    "Frame",
    "FrameRun",
    "LoggedBatch",
    "MatrixDraft",
    "Operation",
    "PackedRows",
    "PublishAck",
    "Receipt",
    "SendChunk",
    "SequencedBatch",
    "bytearray",
    "bytes",
    "memoryview",
}
"""Names of the types that stand for a delta on its way, or for its outcome."""


@dataclass
class _Call:
    path: str
    name: str
    caller: _Call | None
    carries: bool
    hands_on: bool = False

    @property
    def first_of_file(self) -> _Call:
        """The call that entered this file from another one."""
        call = self
        while call.caller is not None and call.caller.path == call.path:
            call = call.caller
        return call


@dataclass
class Way:
    """The way of a delta. `stations`: (path, function) in the order of entry; `backward`: calls back."""

    stations: list[tuple[str, str]] = field(default_factory=list)
    backward: list[tuple[str, str]] = field(default_factory=list)

    @property
    def files(self) -> list[str]:
        """The files of the stations, in the order of entry."""
        return list(dict.fromkeys(path for path, _ in self.stations))


class _Tracer:
    def __init__(self, *, from_tests: bool) -> None:
        self._from_tests = from_tests
        self._frames: dict[int, tuple[FrameType, _Call]] = {}
        self.calls: list[_Call] = []

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        path = frame.f_code.co_filename
        if not path.startswith(_SOURCES) or path.startswith(_NOT_TRACED):
            return
        if event == "return":
            known = self._frames.get(id(frame))
            if known is not None and _carries(result):
                known[1].carries = True
        elif event == "call":
            if id(frame) in self._frames:  # a coroutine goes on
                return
            caller, is_traced = self._caller(frame)
            if is_traced:
                call = _Call(
                    path.removeprefix(_ROOT),
                    frame.f_code.co_qualname,
                    caller,
                    any(map(_carries, _arguments(frame))),
                )
                self._frames[id(frame)] = frame, call
                self.calls.append(call)

    def _caller(self, frame: FrameType) -> tuple[_Call | None, bool]:
        back = frame.f_back
        while back is not None:
            known = self._frames.get(id(back))
            if known is not None:
                return known[1], True
            path = back.f_code.co_filename
            if path.startswith((f"{_ROOT}tests/", *_NOT_TRACED)):
                return None, self._from_tests
            back = back.f_back
        return None, True


def _arguments(frame: FrameType) -> list[Any]:
    code: CodeType = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4)]
    return [frame.f_locals.get(name) for name in names if name not in ("self", "cls")]


def _carries(value: Any, depth: int = 2) -> bool:
    if type(value).__name__ in _CARRIERS:
        return True
    if depth and isinstance(value, list | tuple) and value:
        return _carries(value[0], depth - 1) or _carries(value[-1], depth - 1)
    return bool(depth) and isinstance(value, Mapping) and any(_carries(key, 0) for key in value)


@contextmanager
def traced(*, from_tests: bool) -> Iterator[Way]:
    """Trace the calls of this thread; fill the way at the end. `from_tests`: include what a test calls."""
    way, tracer = Way(), _Tracer(from_tests=from_tests)
    sys.setprofile(tracer)
    try:
        yield way
    finally:
        sys.setprofile(None)
        _fill(way, tracer.calls)


def _fill(way: Way, calls: list[_Call]) -> None:
    entered = [
        call
        for call in calls
        if (call.caller is None or call.caller.path != call.path)
        and call.carries
        and not _is_inside_sink(call)
    ]
    for call in entered:
        if call.caller is not None:
            call.caller.first_of_file.hands_on = True
        if call.path in _waiting_files(call):
            way.backward.append((call.path, call.name))
    for call in entered:
        station = call.path, call.name
        if (call.hands_on or call.path.startswith("sinks/")) and station not in way.stations:
            way.stations.append(station)


def _is_inside_sink(call: _Call) -> bool:
    caller = call.caller
    while caller is not None and not caller.path.startswith("sinks/"):
        caller = caller.caller
    return caller is not None


def _waiting_files(call: _Call) -> set[str]:
    files, caller = set[str](), call.caller
    above = None if caller is None else caller.first_of_file.caller
    while above is not None:
        files.add(above.path)
        above = above.caller
    return files
