"""Faults planned for calls of the fake disk: a call fails, writes too little, or is the last before a crash.

This module does not deal with files: `do` counts and traces each call, and evaluates the rules.
"""

from __future__ import annotations

import errno
import os
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, NoReturn, TypeVar

if TYPE_CHECKING:
    from random import Random

T = TypeVar("T")
Moment = Literal["before", "within", "after"]
Kind = Literal["crash", "fail", "shorten", "lose", "misdirect"]

_FILE_CALLS = ("open", "write", "sync", "truncate", "allocate")
_NAME_CALLS = ("make_directory", "rename", "remove", "remove_directory", "sync_directory", "lock")
CHANGING = frozenset(_FILE_CALLS + _NAME_CALLS)
"""Calls that may change what a crash leaves. `close` and `release` do not count as calls at all."""

_TRACE_MAX = 100_000


class SimCrash(BaseException):
    """The machine is off. `crash()` or `kill()` of the disk returns the disk for the next process.

    A BaseException, so that no `except Exception` catches it.
    """


class Call(NamedTuple):
    """One call of the port. `path`: of a rename, the old path. `at`, `size`: position and size in bytes."""

    number: int
    name: str
    path: str
    at: int
    size: int


When = int | Callable[[Call], bool]
"""The number of a call, or a predicate that is evaluated for each call until it returns true."""


def nth(name: str, count: int, ending: str = "") -> Callable[[Call], bool]:
    """Return a predicate: true for call `count` (from 1) of this name to a path with this ending."""
    matches = 0

    def is_nth(call: Call) -> bool:
        nonlocal matches
        if call.name == name and call.path.endswith(ending):
            matches += 1
            return matches == count
        return False

    return is_nth


@dataclass(slots=True, eq=False)
class _Rule:
    kind: Kind
    when: When
    times: int | None  # the number of occurrences left; None: always
    value: int | None = None  # of `fail`: the error number; of `shorten`: the number of bytes written
    moment: Moment | None = None


def disk_error(code: int, path: str) -> OSError:
    """Return the OSError that the operating system raises for this number."""
    return OSError(code, os.strerror(code), path)


class Faults:
    """The calls of one disk, and the faults planned for them."""

    def __init__(self, rng: Random) -> None:
        self.calls = 0
        self.trace: deque[Call] = deque(maxlen=_TRACE_MAX)
        self.fault_counts: Counter[str] = Counter()
        self.is_off = False
        self.rng = rng
        self._rules: list[_Rule] = []
        self._matching: list[_Rule] = []  # the rules that match the current call

    def fail(self, when: When, error: int = errno.EIO, *, times: int | None = 1) -> None:
        """Make the next `times` calls that match raise OSError of this number; all of them if `times` is
        None.

        A failed write may have written some of its bytes. A failed sync loses some of the unsynced data, and
        the next sync succeeds all the same.
        """
        self._rules.append(_Rule("fail", when, times, error))

    def shorten(self, when: When, written: int | None = None, *, times: int | None = 1) -> None:
        """Make a write stop after `written` bytes, at least one; drawn by default."""
        self._rules.append(_Rule("shorten", when, times, written))

    def lose(self, when: When, *, times: int | None = 1) -> None:
        """Make a sync succeed although some sectors never reach the media: these keep their old content."""
        self._rules.append(_Rule("lose", when, times))

    def misdirect(self, when: When, *, times: int | None = 1) -> None:
        """Make a sync write one sector of a file at the position of another one."""
        self._rules.append(_Rule("misdirect", when, times))

    def crash_at(self, when: When, moment: Moment | None = None) -> None:
        """Turn the machine off at a call: before its effect, after it, or in the middle of a write. The
        moment is drawn by default. This call and every later one raise SimCrash. If the machine goes off
        before a sync, `crash()` may find any part of the unsynced data on the media.
        """
        self._rules.append(_Rule("crash", when, 1, moment=moment))

    def heal(self) -> None:
        """Drop the planned faults."""
        self._rules.clear()
        self._matching.clear()

    def do(
        self,
        name: str,
        path: str,
        effect: Callable[[], T],
        *,
        at: int = 0,
        size: int = 0,
        partly: Callable[[], None] | None = None,
        failing: Callable[[], None] | None = None,
    ) -> T:
        """Run and count a call; or `partly` if the machine goes off within it, or `failing` if it fails."""
        if self.is_off:
            raise SimCrash(f"the machine is off: {name} of {path!r} has no disk")
        self.calls += 1
        call = Call(self.calls, name, path, at, size)
        self.trace.append(call)
        if not self._rules:
            return effect()
        # Evaluate all rules even after one has matched: rules that count calls must see each call.
        self._matching = [rule for rule in self._rules if _matches(rule.when, call)]
        rule = self.next_rule("crash")
        moment = None if rule is None else rule.moment or self.rng.choice(("before", "within", "after"))
        if moment == "within" and partly is None:
            moment = self.rng.choice(("before", "after"))
        if moment == "within" and partly is not None:
            partly()
        if moment in ("before", "within"):
            self._turn_off(call, moment)
        failure = self.next_rule("fail")
        if failure is not None:
            if failing is not None:
                failing()
            self.fault_counts[f"{name} failed"] += 1
            raise disk_error(failure.value or errno.EIO, path)
        if moment is None:
            return effect()
        with suppress(OSError):
            effect()
        return self._turn_off(call, "after")

    def next_rule(self, kind: Kind) -> _Rule | None:
        """Return the first rule of a kind that matches the current call, and count one occurrence of it."""
        for rule in self._matching:
            if rule.kind == kind:
                if rule.times is not None:
                    rule.times -= 1
                    if rule.times <= 0:
                        self._rules.remove(rule)
                self._matching.remove(rule)
                return rule
        return None

    def _turn_off(self, call: Call, moment: Moment) -> NoReturn:
        self.is_off = True
        self.fault_counts[f"off {moment}"] += 1
        raise SimCrash(f"the machine went off {moment} call {call.number}, {call.name} of {call.path!r}")


def _matches(when: When, call: Call) -> bool:
    return when == call.number if isinstance(when, int) else when(call)
