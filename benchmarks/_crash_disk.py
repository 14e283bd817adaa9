"""Rounds on a real disk that fails beneath a service which is not killed: it recovers in place.

Directories take turns: the server with clients over the network, and a process with callers of its own. Each
directory lies on a small file system of its own, where one can be mounted, and lives through a few failures.
After each, once all is quiet, every answer is held against the log, whose files this process reads.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from benchmarks._crash_answers import KINDS, Failures, counted, judge, read_places
from benchmarks._crash_check import Verdict
from benchmarks._crash_load import Round, log_settings
from benchmarks._crash_rounds import Life
from benchmarks._disk_faults import ALWAYS, CALLS, FULL, Ballast, FailingCalls, Failure, build, drawn
from benchmarks._images import Unusable, check_usable, mounted
from benchmarks._measure import table, write_json
from delta_prop_broker.local_disk import LocalDisk
from delta_prop_wire.delta import AckLevel

if TYPE_CHECKING:
    import argparse

IMAGE_BYTES = 64 * 1024 * 1024
BUSY_S, LATE_S = 1.2, 5.0
ANSWER_S_MAX = 200.0
END_S_MAX = 60.0
SKIPPED = 77
TOLD_MAX = 30
"""How many violations are told in words; all are counted."""
SERVED, EMBEDDED = "server", "embedded"
_METRIC = "delta_prop_log_failed "


@dataclass(slots=True)
class Totals:
    """The sum of some rounds. `struck`: failures by kind that really came; `failures`: of the log."""

    rounds: int = 0
    directories: int = 0
    calls_failed: int = 0
    failures: int = 0
    connections: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    told: Counter[str] = field(default_factory=Counter)
    verdict: Verdict = field(default_factory=Verdict)


def run(given: argparse.Namespace, seed: int) -> int:
    """Fail, check, print; the exit status."""
    totals = {name: Totals() for name in (SERVED, EMBEDDED)}
    left_out: list[str] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="delta-prop-crash-")))
        library, mount = _library(folder, left_out), _mount(stack, folder, left_out)
        kinds = [*(CALLS if library is not None else ()), *([FULL] if mount is not None else [])]
        if not kinds:
            return SKIPPED
        place = Place(mount or folder / "data", folder, library, kinds)
        chance, done = random.Random(seed), 0
        while done < given.rounds:
            name = (SERVED, EMBEDDED)[sum(one.directories for one in totals.values()) % 2]
            rounds = min(given.lives, given.rounds - done)
            kind = Served if name == SERVED else Embedded
            kind(place, totals[name], chance).live(range(done + 1, done + rounds + 1), given.rounds)
            done += rounds
    return report(f"failing disks, {given.rounds} rounds, seed {seed}", totals, left_out, given.json)


def _library(folder: Path, left_out: list[str]) -> Path | None:
    try:
        return build(folder)
    except Unusable as reason:
        _leave_out(left_out, f"calls that fail: {reason}")
        return None


def _mount(stack: ExitStack, folder: Path, left_out: list[str]) -> Path | None:
    try:
        check_usable("ext4")
        return stack.enter_context(mounted("ext4", folder, IMAGE_BYTES)).mount
    except Unusable as reason:
        _leave_out(left_out, f"full file systems: {reason}")
        return None


def _leave_out(left_out: list[str], what: str) -> None:
    left_out.append(what)
    print(f"NOT RUN: {what}", file=sys.stderr)


@dataclass(frozen=True, slots=True)
class Place:
    """Where directories lie, and what can fail there."""

    data: Path
    scratch: Path
    library: Path | None
    kinds: list[str]


class _Directory:
    """One directory from its first round to its last."""

    name = ""

    def __init__(self, place: Place, totals: Totals, chance: random.Random) -> None:
        self.totals = totals
        self.level = chance.choice((AckLevel.DURABLE, AckLevel.DURABLE, AckLevel.LOGGED))
        self.roomy = chance.random() < 0.5
        self.directory = place.data / "log"
        self._place = place
        self._chance = chance
        self._ballast = Ballast(place.data / "ballast")
        self._failing: FailingCalls | None = None
        totals.directories += 1

    def live(self, numbers: range, rounds: int) -> None:
        """Start, fail a few times, end well."""
        place = self._place
        place.data.mkdir(exist_ok=True)
        env: dict[str, str] = {}
        if place.library is not None:
            self._failing = FailingCalls(place.library, place.scratch / "faults", self.directory)
            env = self._failing.env
        life = self._start(env)
        try:
            if not self._is_ready(life):
                self.totals.verdict.add("stuck", f"the service did not start: {life.complaint()}")
                return
            for number in numbers:
                self._round(life, number, rounds)
            self._end(life)
        finally:
            life.kill()
            self._ballast.free()
            if self._failing is not None:
                self._failing.close()
            shutil.rmtree(self.directory, ignore_errors=True)

    def _round(self, life: Life, number: int, rounds: int) -> None:
        totals, before = self.totals, self.totals.verdict.total
        failure = drawn(self._place.kinds[number % len(self._place.kinds)], self._chance, BUSY_S)
        one = anyio.run(self._live_through, life, number, failure)
        struck = self._failing.struck if self._failing is not None and failure.kind != FULL else 0
        totals.rounds += 1
        totals.calls_failed += struck
        totals.failures += one.watched.failures
        totals.connections += one.connections
        totals.struck[failure.kind] += bool(struck or failure.kind == FULL)
        totals.told += counted(one.answers)
        if one.stuck:
            totals.verdict.add("stuck", f"round {number}: {one.stuck}")
        places = read_places(LocalDisk(self.directory))
        failures = Failures(decided_s=one.watched.decided_s, late_s=LATE_S)
        totals.verdict.take(judge(places, one.answers, failures))
        found, told = totals.verdict.total - before, counted(one.answers)
        answers = ", ".join(f"{told[kind]:,} {kind}" for kind in ("acknowledged", "refused", "unknown"))
        said = f"round {number} of {rounds}, {self.name}: {failure}: log failed {one.watched.failures} times"
        verdict = f"{found} VIOLATIONS" if found else "all true"
        print(f"{said}, {answers}: {verdict}", file=sys.stderr, flush=True)

    async def _live_through(self, life: Life, number: int, failure: Failure) -> Round:
        one = Round(number, BUSY_S, self.level)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._fail, failure)
            await self._load(life, number, one)
        return one

    async def _fail(self, failure: Failure) -> None:
        """Have the disk fail, for as long as it is to."""
        await anyio.sleep(failure.after_s)
        if failure.kind == FULL:
            await anyio.to_thread.run_sync(self._ballast.fill)
            await anyio.sleep(failure.lasts_s)
            self._ballast.free()
        elif self._failing is not None:
            self._failing.arm(failure.rules)
            goes_on = failure.rules[0].times == ALWAYS
            await anyio.sleep(failure.lasts_s if goes_on else BUSY_S - failure.after_s)
            self._failing.disarm()

    def _end(self, life: Life) -> None:
        life.terminate()
        status = life.wait(END_S_MAX)
        if status != 0:
            self.totals.verdict.add("stuck", f"the service did not end well ({status}): {life.complaint()}")

    def _start(self, env: dict[str, str]) -> Life:
        raise NotImplementedError

    def _is_ready(self, life: Life) -> bool:
        raise NotImplementedError

    async def _load(self, life: Life, number: int, one: Round) -> None:
        raise NotImplementedError


class Served(_Directory):
    """`delta-prop serve`, with clients in this process."""

    name = SERVED
    _port = _http_port = 0

    def _start(self, env: dict[str, str]) -> Life:
        config = self._place.scratch / "serve.toml"
        bounds = "".join(f"{key} = {value}\n" for key, value in log_settings(roomy=self.roomy).items())
        config.write_text(f"[log]\n{bounds}")
        return Life(
            self._place.scratch / "errors",
            *("-m", "delta_prop", "serve", "--config", str(config), "--data", str(self.directory)),
            *("--port", "0", "--http-port", "0", "--level", self.level.name.lower()),
            env=env,
        )

    def _is_ready(self, life: Life) -> bool:
        line = life.first_line()
        if line is None or not line.startswith("ready "):
            return False
        told = dict(word.split("=") for word in line.split()[1:])
        self._port, self._http_port = int(told["port"]), int(told["http"])
        return True

    async def _load(self, life: Life, number: int, one: Round) -> None:
        async def failed() -> bool:
            return await anyio.to_thread.run_sync(self._says_failed, abandon_on_cancel=True)

        await one.remote(self._port, failed)

    def _says_failed(self) -> bool:
        url = f"http://127.0.0.1:{self._http_port}/metrics"
        with urllib.request.urlopen(url, timeout=10.0) as answer:
            lines: list[str] = answer.read().decode().splitlines()
        return any(float(line.split()[1]) == 1 for line in lines if line.startswith(_METRIC))


class Embedded(_Directory):
    """A process that publishes within itself."""

    name = EMBEDDED

    def _start(self, env: dict[str, str]) -> Life:
        return Life(
            self._place.scratch / "errors",
            *("-m", "benchmarks._crash_load", str(self.directory), "--level", self.level.name.lower()),
            *(["--roomy"] if self.roomy else []),
            env=env,
        )

    def _is_ready(self, life: Life) -> bool:
        return life.first_line() is not None

    async def _load(self, life: Life, number: int, one: Round) -> None:
        lines = len(life.lines)
        life.tell(json.dumps({"number": number, "busy_s": BUSY_S, "level": self.level.name.lower()}))
        deadline = time.monotonic() + ANSWER_S_MAX
        while len(life.lines) == lines and life.is_alive and time.monotonic() < deadline:  # noqa: ASYNC110 - a thread
            await anyio.sleep(0.02)
        if len(life.lines) == lines:
            one.stuck = f"the process says nothing: {life.complaint()}"
            return
        told = json.loads(life.lines[-1])
        one.answers.take(told["answers"])
        one.stuck, one.watched.failures = told["stuck"], told["failures"]
        one.watched.decided_s = told["decided_s"]

    def _end(self, life: Life) -> None:
        life.close_input()
        status = life.wait(END_S_MAX)
        if status != 0:
            self.totals.verdict.add("stuck", f"the process did not end well ({status}): {life.complaint()}")


def report(title: str, totals: dict[str, Totals], left_out: list[str], path: Path | str | None) -> int:
    """Print what was found; the exit status."""
    columns = {name: one for name, one in totals.items() if one.rounds}
    kinds = [kind for kind in (*CALLS, FULL) if any(one.struck[kind] for one in columns.values())]
    rows: list[tuple[object, ...]] = [
        ("rounds", *(one.rounds for one in columns.values())),
        ("directories", *(one.directories for one in columns.values())),
        *((f"  {kind}", *(one.struck[kind] for one in columns.values())) for kind in kinds),
        ("calls of the disk that failed", *(f"{one.calls_failed:,}" for one in columns.values())),
        ("failures of the log", *(one.failures for one in columns.values())),
        ("connections of bare clients", *(f"{one.connections:,}" for one in columns.values())),
        *((text, *(f"{one.told[name]:,}" for one in columns.values())) for name, text in _TOLD.items()),
        *((kind, *(one.verdict.counts[kind] for one in columns.values())) for kind in KINDS),
    ]
    print(table(title, ("", *columns), rows))
    for what in left_out:
        print(f"not run: {what}")
    for one in columns.values():
        print("".join(f"{text}\n" for text in one.verdict.told[:TOLD_MAX]), end="")
    # Where nothing failed, or nothing was promised, nothing could be broken.
    vacuous = [
        name
        for name, one in columns.items()
        if 2 * one.failures < one.rounds or one.told["acknowledged"] < 100 * one.rounds
    ]
    for name in vacuous:
        print(f"{name}: too little failed, or was acknowledged, for the check to mean anything")
    violations = sum(one.verdict.total for one in columns.values())
    print(f"{violations} violations: " + ("FAILED" if violations or vacuous else "every answer is true"))
    figures = {name: _plain(one) for name, one in columns.items()}
    write_json(
        path,
        {"title": title, "violations": violations, "vacuous": vacuous, "not run": left_out, **figures},
    )
    return 1 if violations or vacuous or not columns else 0


_TOLD = {
    "rows": "rows asked for",
    "acknowledged": "  acknowledged",
    "duplicate": "    as duplicates",
    "refused": "  has not happened",
    "unknown": "  may have happened",
    "asked": "    asked for by the dot",
    "welcomes": "watermarks told by a hello",
}


def _plain(totals: Totals) -> dict[str, Any]:
    """Return what JSON can hold."""
    numbers = {key: value for key, value in asdict(totals).items() if isinstance(value, int)}
    counts, told = dict(totals.verdict.counts), totals.verdict.told
    return numbers | {
        "struck": dict(totals.struck),
        "told": dict(totals.told),
        "verdict": {"counts": counts, "told": told},
    }
