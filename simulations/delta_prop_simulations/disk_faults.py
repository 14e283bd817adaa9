"""Faults planned for calls of the fake disk: a call fails, is cut short, or is the last one.

This module knows no files: `do` counts each call, records a trace of them, and evaluates the rules.
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
_NAME_CALLS = ("make_directory", "rename", "remove", "sync_directory", "lock")
CHANGING = frozenset(_FILE_CALLS + _NAME_CALLS)
"""Calls that may change what a crash leaves; `close` and `release` do not count as calls at all."""

_TRACE_MAX = 100_000


class SimCrash(BaseException):
    """The machine is off. No `except Exception` may stop it; afterwards use `crash()`, or `kill()`."""


class Call(NamedTuple):
    """One call of the port; `path` is the old name for a rename, `size` in bytes."""

    number: int
    name: str
    path: str
    at: int
    size: int


When = int | Callable[[Call], bool]
"""The number of a call, or a predicate that is evaluated for each call until it returns true."""


def nth(name: str, count: int, ending: str = "") -> Callable[[Call], bool]:
    """Return a predicate of the count-th call (from 1) with this name and path ending: `nth("write", 2,
    ".log")`.
    """
    seen = 0

    def is_it(call: Call) -> bool:
        nonlocal seen
        if call.name == name and call.path.endswith(ending):
            seen += 1
            return seen == count
        return False

    return is_it


@dataclass(slots=True, eq=False)
class _Rule:
    kind: Kind
    when: When
    times: int | None  # the number of occurrences left; None: always
    value: int | None = None
    moment: Moment | None = None


def disk_error(code: int, path: str) -> OSError:
    """Return the OSError that the operating system raises for this number."""
    return OSError(code, os.strerror(code), path)


class Faults:
    """The calls of one disk, and the faults planned for them."""

    def __init__(self, rng: Random) -> None:
        self.calls = 0
        self.trace: deque[Call] = deque(maxlen=_TRACE_MAX)
        self.struck: Counter[str] = Counter()
        self.is_off = False
        self.rng = rng
        self._rules: list[_Rule] = []
        self._striking: list[_Rule] = []

    # --- planned faults

    def fail(self, when: When, error: int = errno.EIO, *, times: int | None = 1) -> None:
        """Make a call raise OSError of this number, `times` times; None: always.

        A failed write may have written some of its bytes. A failed sync loses some of the unsynced data, and
        the next one succeeds without it.
        """
        self._rules.append(_Rule("fail", when, times, error))

    def shorten(self, when: When, taken: int | None = None, *, times: int | None = 1) -> None:
        """Make a write take only `taken` bytes, at least one; drawn by default."""
        self._rules.append(_Rule("shorten", when, times, taken))

    def lose(self, when: When, *, times: int | None = 1) -> None:
        """Make a sync succeed though some sectors never reach the media: they keep their old content."""
        self._rules.append(_Rule("lose", when, times))

    def misdirect(self, when: When, *, times: int | None = 1) -> None:
        """Make a sync write one sector to the position of another one of the file."""
        self._rules.append(_Rule("misdirect", when, times))

    def crash_at(self, when: When, moment: Moment | None = None) -> None:
        """Turn the machine off at a call: before its effect, after it, or within a write that is partly done.
        The moment is drawn by default. The call raises SimCrash, and so does every later one. If the machine
        goes off before a sync, `crash()` leaves any part of the data to sync.
        """
        self._rules.append(_Rule("crash", when, 1, moment=moment))

    def heal(self) -> None:
        """Drop the planned faults."""
        self._rules.clear()
        self._striking.clear()

    # --- each call

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
        """Count a call and apply its effect: `partly` if the machine goes off within it, `failing` if the
        call fails.
        """
        if self.is_off:
            raise SimCrash(f"the machine is off: {name} of {path!r} has no disk")
        self.calls += 1
        call = Call(self.calls, name, path, at, size)
        self.trace.append(call)
        if not self._rules:
            return effect()
        # Every rule is evaluated, whichever applies: rules that count calls must see each call.
        self._striking = [rule for rule in self._rules if _strikes(rule.when, call)]
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
            self.struck[f"{name} failed"] += 1
            raise disk_error(failure.value or errno.EIO, path)
        if moment is None:
            return effect()
        with suppress(OSError):
            effect()
        return self._turn_off(call, "after")

    def next_rule(self, kind: Kind) -> _Rule | None:
        """Return the first rule of a kind that applies to the current call, and count its occurrence."""
        for rule in self._striking:
            if rule.kind == kind:
                if rule.times is not None:
                    rule.times -= 1
                    if rule.times <= 0:
                        self._rules.remove(rule)
                self._striking.remove(rule)
                return rule
        return None

    def _turn_off(self, call: Call, moment: Moment) -> NoReturn:
        self.is_off = True
        self.struck[f"off {moment}"] += 1
        raise SimCrash(f"the machine went off {moment} call {call.number}, {call.name} of {call.path!r}")


def _strikes(when: When, call: Call) -> bool:
    return when == call.number if isinstance(when, int) else when(call)
