"""Rounds in which a real disk fails under a service; the service is not killed and recovers in place.

The directories are used in turn by the server, with clients over the network, and by a process with callers
of its own. They are on a small file system, if it can be mounted. Each round has one failure of the disk.
After it, once no call is in flight, every answer is compared with the log, whose files this process reads.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from benchmarks._crash_answers import KINDS, Failures, count_answers, judge, read_log_index
from benchmarks._crash_check import Verdict, print_totals
from benchmarks._crash_load import Round, log_settings
from benchmarks._crash_rounds import ChildProcess
from benchmarks._disk_faults import ALWAYS, CALLS, FULL, Ballast, FailingCalls, Failure, build, draw_failure
from benchmarks._images import UnusableError, check_usable, mount_image
from benchmarks._measure import write_json
from delta_prop_broker.local_disk import LocalDisk
from delta_prop_wire.delta import AckLevel

IMAGE_BYTES = 64 * 1024 * 1024
BUSY_S = 1.2
"""Seconds for which callers make calls in each round."""
GRACE_S = 5.0
"""Seconds after its deadline for which an answer may still come."""
ANSWER_S_MAX = 200.0
"""Maximum seconds until a process with callers prints the answers of a round."""
END_S_MAX = 60.0
SKIPPED = 77
SHOWN_MAX = 30
"""Violations that are described; all are counted."""
SERVED, EMBEDDED = "server", "embedded"
_METRIC = "delta_prop_log_failed "


@dataclass(slots=True)
class Totals:
    """Sums over several rounds. `calls_failed`: calls to the disk; `disk_failures`: rounds with a failure, by
    kind; `log_failures`: how often the log failed; `connections`: those of bare clients.
    """

    rounds: int = 0
    directories: int = 0
    calls_failed: int = 0
    log_failures: int = 0
    connections: int = 0
    disk_failures: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    verdict: Verdict = field(default_factory=Verdict)

    def to_json(self) -> dict[str, Any]:
        """Return the totals as JSON values."""
        numbers = {key: value for key, value in asdict(self).items() if isinstance(value, int)}
        counts = {"disk_failures": dict(self.disk_failures), "answers": dict(self.answers)}
        return numbers | counts | {"verdict": self.verdict.to_json()}


def run(given: argparse.Namespace, seed: int) -> int:
    """Make disks fail, check, print; return the exit status."""
    totals = {name: Totals() for name in (SERVED, EMBEDDED)}
    skipped: list[str] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="delta-prop-crash-")))
        library, mount = _build_library(folder, skipped), _mount_small(stack, folder, skipped)
        kinds = [*(CALLS if library is not None else ()), *([FULL] if mount is not None else [])]
        if not kinds:
            return SKIPPED
        setup = DiskSetup(mount or folder / "data", folder, library, kinds)
        rng, rounds_done = random.Random(seed), 0
        while rounds_done < given.rounds:
            name = (SERVED, EMBEDDED)[sum(one.directories for one in totals.values()) % 2]
            rounds = min(given.rounds_per_directory, given.rounds - rounds_done)
            directory_type = ServedDirectory if name == SERVED else EmbeddedDirectory
            numbers = range(rounds_done + 1, rounds_done + rounds + 1)
            directory_type(setup, totals[name], rng).run_rounds(numbers, given.rounds)
            rounds_done += rounds
    return report(f"failing disks, {given.rounds} rounds, seed {seed}", totals, skipped, given.json)


def _build_library(folder: Path, skipped: list[str]) -> Path | None:
    try:
        return build(folder)
    except UnusableError as reason:
        _note_skipped(skipped, f"calls that fail: {reason}")
        return None


def _mount_small(stack: ExitStack, folder: Path, skipped: list[str]) -> Path | None:
    try:
        check_usable("ext4")
        return stack.enter_context(mount_image("ext4", folder, IMAGE_BYTES)).mount
    except UnusableError as reason:
        _note_skipped(skipped, f"full file systems: {reason}")
        return None


def _note_skipped(skipped: list[str], what: str) -> None:
    skipped.append(what)
    print(f"NOT RUN: {what}", file=sys.stderr)


@dataclass(frozen=True, slots=True)
class DiskSetup:
    """The folders to use, and the kinds of failures that are possible."""

    data: Path
    scratch: Path
    library: Path | None
    kinds: list[str]


class _Directory:
    """One data directory, and the rounds of one process on it."""

    name = ""

    def __init__(self, setup: DiskSetup, totals: Totals, rng: random.Random) -> None:
        self.totals = totals
        self.level = rng.choice((AckLevel.DURABLE, AckLevel.DURABLE, AckLevel.LOGGED))
        self.has_reserve = rng.random() < 0.5
        self.directory = setup.data / "log"
        self._setup = setup
        self._rng = rng
        self._ballast = Ballast(setup.data / "ballast")
        self._failing: FailingCalls | None = None
        totals.directories += 1

    def run_rounds(self, numbers: range, rounds: int) -> None:
        """Start the service, make its disk fail in each round, end it cleanly.

        `numbers`: those of the rounds on this directory; `rounds`: the number of rounds on all directories.
        """
        setup = self._setup
        setup.data.mkdir(exist_ok=True)
        env: dict[str, str] = {}
        if setup.library is not None:
            self._failing = FailingCalls(setup.library, setup.scratch / "faults", self.directory)
            env = self._failing.env
        process = self._start(env)
        try:
            if not self._is_ready(process):
                self.totals.verdict.add("stuck", f"the service did not start: {process.error_line()}")
                return
            for number in numbers:
                self._run_round(process, number, rounds)
            self._request_end(process)
            status = process.wait(END_S_MAX)
            if status != 0:
                text = f"the service did not end cleanly ({status}): {process.error_line()}"
                self.totals.verdict.add("stuck", text)
        finally:
            process.kill()
            self._ballast.free()
            if self._failing is not None:
                self._failing.close()
            shutil.rmtree(self.directory, ignore_errors=True)

    def _run_round(self, process: ChildProcess, number: int, rounds: int) -> None:
        totals, before = self.totals, self.totals.verdict.total
        failure = draw_failure(self._setup.kinds[number % len(self._setup.kinds)], self._rng, BUSY_S)
        round_ = anyio.run(self._run_with_failure, process, number, failure)
        failed_calls = self._failing.failed_calls if self._failing is not None and failure.kind != FULL else 0
        totals.rounds += 1
        totals.calls_failed += failed_calls
        log_failures = round_.log_watch.failures
        totals.log_failures += log_failures
        totals.connections += round_.connections
        totals.disk_failures[failure.kind] += bool(failed_calls or failure.kind == FULL)
        totals.answers += count_answers(round_.answers)
        if round_.stuck_callers:
            totals.verdict.add("stuck", f"round {number}: {round_.stuck_callers}")
        index = read_log_index(LocalDisk(self.directory))
        failures = Failures(recovered_s=round_.log_watch.recovered_s, grace_s=GRACE_S)
        totals.verdict.merge(judge(index, round_.answers, failures))
        new_violations, counts = totals.verdict.total - before, count_answers(round_.answers)
        answers = ", ".join(f"{counts[kind]:,} {kind}" for kind in ("acknowledged", "refused", "unknown"))
        title = f"round {number} of {rounds}, {self.name}: {failure}: log failed {log_failures} times"
        verdict = f"{new_violations} VIOLATIONS" if new_violations else "all true"
        print(f"{title}, {answers}: {verdict}", file=sys.stderr, flush=True)

    async def _run_with_failure(self, process: ChildProcess, number: int, failure: Failure) -> Round:
        round_ = Round(number, BUSY_S, self.level)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._fail, failure)
            await self._run_load(process, number, round_)
        return round_

    async def _fail(self, failure: Failure) -> None:
        """Make the disk fail for as long as the failure lasts."""
        await anyio.sleep(failure.after_s)
        if failure.kind == FULL:
            await anyio.to_thread.run_sync(self._ballast.fill)
            await anyio.sleep(failure.lasts_s)
            self._ballast.free()
        elif self._failing is not None:
            self._failing.arm(failure.rules)
            is_lasting = failure.rules[0].times == ALWAYS
            await anyio.sleep(failure.lasts_s if is_lasting else BUSY_S - failure.after_s)
            self._failing.disarm()

    def _request_end(self, process: ChildProcess) -> None:
        process.terminate()

    def _start(self, env: dict[str, str]) -> ChildProcess:
        raise NotImplementedError

    def _is_ready(self, process: ChildProcess) -> bool:
        raise NotImplementedError

    async def _run_load(self, process: ChildProcess, number: int, round_: Round) -> None:
        raise NotImplementedError


class ServedDirectory(_Directory):
    """`delta-prop serve`, with clients in this process."""

    name = SERVED
    _port = _http_port = 0

    def _start(self, env: dict[str, str]) -> ChildProcess:
        config = self._setup.scratch / "serve.toml"
        bounds = log_settings(has_reserve=self.has_reserve)
        config.write_text("\n".join(["[log]", *(f"{key} = {value}" for key, value in bounds.items())]))
        return ChildProcess(
            self._setup.scratch / "errors",
            *("-m", "delta_prop", "serve", "--config", str(config), "--data", str(self.directory)),
            *("--port", "0", "--http-port", "0", "--read-level", self.level.name.lower()),
            env=env,
        )

    def _is_ready(self, process: ChildProcess) -> bool:
        line = process.first_line()
        if line is None or not line.startswith("ready "):
            return False
        ports = dict(word.split("=") for word in line.split()[1:])
        self._port, self._http_port = int(ports["port"]), int(ports["http"])
        return True

    async def _run_load(self, process: ChildProcess, number: int, round_: Round) -> None:
        async def has_log_failed() -> bool:
            return await anyio.to_thread.run_sync(self._read_log_failed, abandon_on_cancel=True)

        await round_.run_remote(self._port, has_log_failed)

    def _read_log_failed(self) -> bool:
        url = f"http://127.0.0.1:{self._http_port}/metrics"
        with urllib.request.urlopen(url, timeout=10.0) as answer:
            lines: list[str] = answer.read().decode().splitlines()
        return any(float(line.split()[1]) == 1 for line in lines if line.startswith(_METRIC))


class EmbeddedDirectory(_Directory):
    """A process that runs the service and its callers."""

    name = EMBEDDED

    def _start(self, env: dict[str, str]) -> ChildProcess:
        return ChildProcess(
            self._setup.scratch / "errors",
            *("-m", "benchmarks._crash_load", str(self.directory), "--level", self.level.name.lower()),
            *(["--reserve"] if self.has_reserve else []),
            env=env,
        )

    def _is_ready(self, process: ChildProcess) -> bool:
        return process.first_line() is not None

    async def _run_load(self, process: ChildProcess, number: int, round_: Round) -> None:
        line_count = len(process.lines)
        process.send_line(json.dumps({"number": number, "busy_s": BUSY_S, "level": self.level.name.lower()}))
        deadline = time.monotonic() + ANSWER_S_MAX
        # A thread reads the process's output, so there is no event to wait for.
        while len(process.lines) == line_count and process.is_alive and time.monotonic() < deadline:  # noqa: ASYNC110
            await anyio.sleep(0.02)
        if len(process.lines) == line_count:
            round_.stuck_callers = f"the process printed nothing: {process.error_line()}"
            return
        printed = json.loads(process.lines[-1])
        round_.answers.merge(printed["answers"])
        round_.stuck_callers, round_.log_watch.failures = printed["stuck"], printed["failures"]
        round_.log_watch.recovered_s = printed["recovered_s"]

    def _request_end(self, process: ChildProcess) -> None:
        process.close_input()


def report(title: str, totals: dict[str, Totals], skipped: list[str], path: Path | str | None) -> int:
    """Print the totals and the violations; return the exit status."""
    columns = {name: one for name, one in totals.items() if one.rounds}
    kinds = [kind for kind in (*CALLS, FULL) if any(one.disk_failures[kind] for one in columns.values())]
    labels: dict[str, Callable[[Totals], object]] = {
        "rounds": lambda one: one.rounds,
        "directories": lambda one: one.directories,
        **{f"  {kind}": partial(_count, "disk_failures", kind) for kind in kinds},
        "calls of the disk that failed": lambda one: f"{one.calls_failed:,}",
        "failures of the log": lambda one: one.log_failures,
        "connections of bare clients": lambda one: f"{one.connections:,}",
        **{text: partial(_count, "answers", name) for name, text in _LABELS.items()},
    }
    violations = print_totals(title, columns, labels, KINDS)
    for what in skipped:
        print(f"not run: {what}")
    for one in columns.values():
        print("".join(f"{text}\n" for text in one.verdict.examples[:SHOWN_MAX]), end="")
    # A run with next to no failures or acknowledgements proves nothing.
    vacuous = [
        name
        for name, one in columns.items()
        if 2 * one.log_failures < one.rounds or one.answers["acknowledged"] < 100 * one.rounds
    ]
    for name in vacuous:
        print(f"{name}: too few failures or acknowledgements for a meaningful check: run more rounds")
    violations = sum(one.verdict.total for one in columns.values())
    print(f"{violations} violations: " + ("FAILED" if violations or vacuous else "every answer is true"))
    figures = {name: one.to_json() for name, one in columns.items()}
    write_json(
        path, {"title": title, "violations": violations, "vacuous": vacuous, "not run": skipped, **figures}
    )
    return 1 if violations or vacuous or not columns else 0


_LABELS = {
    "rows": "rows sent",
    "acknowledged": "  acknowledged",
    "duplicate": "    as duplicates",
    "refused": "  refused, without effect",
    "unknown": "  of unknown outcome",
    "queried": "    outcome queries by the dot",
    "welcomes": "watermarks in answers to a hello",
}


def _count(field: str, name: str, totals: Totals) -> str:
    return f"{getattr(totals, field)[name]:,}"
