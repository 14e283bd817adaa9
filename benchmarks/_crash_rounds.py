"""Runs of the process that gets killed, and the checks between two runs."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks._crash_check import (
    History,
    Log,
    Table,
    Verdict,
    check_log,
    check_service,
    check_table,
    read_log,
    read_table,
)
from benchmarks._crash_writer import ACTIVITIES, make_delta
from benchmarks._processes import ignore_interrupts
from delta_prop_wire.jsonlines import delta_to_json

READY_S_MAX = 30.0
END_S_MAX = 60.0
COMMAND_LINES = 20_000
"""Lines of each producer that the command `delta-prop publish` gets; no run lasts until their end."""
START_SHARE = 0.2
"""The share of kills that come while the process starts, or shortly after."""
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class DirectoryOptions:
    """Options of the service on one directory. `storage`: it also feeds a SQLite file."""

    level: str = "durable"
    storage: bool = False
    segment_bytes: int = 256 * 1024
    producers: tuple[str, ...] = ("p0", "p1", "p2", "p3")
    overlap_lines: int = 25  # how many acknowledged lines of a producer a new process acknowledges again
    retention_bytes: int | None = None  # so much is retained, the rest compacted; None: nothing is compacted


class ChildProcess:
    """One Python process. `lines`: those that it has printed so far. The caller must end it with `kill`."""

    def __init__(self, errors: Path, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        """`errors`: the file for its standard error; `arguments`: those of Python; `env`: additional
        variables of the environment.
        """
        self.began = time.monotonic()
        self._errors = errors.open("w+")
        with ignore_interrupts():
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=_ROOT,
                env=os.environ | dict(env or {}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
        self.lines: list[str] = []
        self._first = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def ready(self) -> dict[str, object] | None:
        """Return the JSON that it prints when it is ready; None if it ended before."""
        line = self.first_line()
        return None if line is None else json.loads(line)

    def first_line(self) -> str | None:
        """Wait for the first line that it prints and return it; None if it ended before."""
        self._first.wait(READY_S_MAX)
        return self.lines[0] if self.lines else None

    def send_line(self, line: str) -> None:
        """Write a line, such as `go` or `end`, to its standard input."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the end of its output shows that it died
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def wait(self, timeout_s: float) -> int | None:
        """Wait until it ends by itself; return its exit status, or None after the timeout."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    @property
    def is_alive(self) -> bool:
        """True until it has ended."""
        return self._process.poll() is None

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self._process.terminate()

    def close_input(self) -> None:
        """Close its standard input."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def kill(self) -> None:
        """Kill it, and read the rest of its output."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        self._errors.close()

    def error_line(self) -> str:
        """Return the last line of its standard error that names an error."""
        lines = Path(self._errors.name).read_text().strip().splitlines()
        error_lines = [line.strip(" |+-") for line in lines if re.match(r"[ |+-]*[\w.]+: ", line)]
        return (error_lines or lines or ["standard error is empty"])[-1]

    def freeze(self, timeout_s: float = 5.0) -> bool:
        """Stop every thread, after its current call to the disk; return False if a thread does not stop."""
        os.kill(self.pid, signal.SIGSTOP)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if all(_state(task) in "TtZX" for task in Path(f"/proc/{self.pid}/task").iterdir()):
                return True
            time.sleep(0.0005)
        return False

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)
            self._first.set()
        self._first.set()


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"


@dataclass(slots=True)
class Totals:
    """Sums over several rounds. `in_start`: kills while the process started; `rows`: those in the logs, of
    which `unacknowledged` were never acknowledged; `rolls`: segments begun after the first; `cuts`: starts
    that truncated a torn tail; `interrupted`: kills during each activity; `restarts_s`: seconds from the
    start of a process until it was ready; `opens_s`: seconds of that for opening the log.
    """

    rounds: int = 0
    in_start: int = 0
    directories: int = 0
    acks: int = 0
    duplicates: int = 0
    rows: int = 0
    unacknowledged: int = 0
    rolls: int = 0
    cuts: int = 0
    interrupted: Counter[str] = field(default_factory=Counter)
    restarts_s: list[float] = field(default_factory=list)
    opens_s: list[float] = field(default_factory=list)
    verdict: Verdict = field(default_factory=Verdict)

    def to_json(self) -> dict[str, object]:
        """Return the totals as JSON values; before Python 3.12 `asdict` alone breaks a Counter."""
        counted = replace(self, interrupted=Counter(), verdict=Verdict())
        return asdict(counted) | {"interrupted": dict(self.interrupted), "verdict": self.verdict.to_json()}


class CrashRun:
    """One directory from its first process to its last: its acknowledgements, and the checks against them."""

    def __init__(
        self,
        directory: Path,
        options: DirectoryOptions,
        totals: Totals,
        rng: random.Random,
        *,
        run_s: tuple[float, float] = (0.05, 0.6),
        start_share: float = START_SHARE,
        end_process: Callable[[ChildProcess], None] = ChildProcess.kill,
        corrupt: Callable[[Path], None] = lambda _directory: None,
        scratch: Path | None = None,
    ) -> None:
        """`run_s`: bounds of the seconds for which a process publishes before `end_process` ends it;
        `start_share`: the share of processes that are ended while they start; `corrupt` may plant a fault
        while no process runs; `scratch`: a folder for copies, outside `directory`.
        """
        self.directory = directory
        self.options = options
        self.totals = totals
        self.history = History()
        self._rng = rng
        self._run_s = run_s
        self._start_share = start_share
        self._end_process = end_process
        self._corrupt = corrupt
        self._scratch = scratch or directory.with_name(directory.name + "-copy")
        self._activities = self._beside("activities")
        self._process_count = 0
        totals.directories += 1

    def _beside(self, suffix: str) -> Path:
        return self._scratch.with_name(f"{self._scratch.name}.{suffix}")

    def run_round(self) -> bool:
        """Start a process, check the log, let it publish, kill it. Return False if it did not start."""
        totals, rng = self.totals, self._rng
        totals.rounds += 1
        self._corrupt(self.directory)
        table = self._copy_table()
        process = self._start()
        try:
            if rng.random() < self._start_share:
                totals.in_start += 1
                self._let_run(process, rng.uniform(0.0, 0.6))
                return True
            if not self._check_start(process, table):
                return False
            process.send_line("go")
            self._let_run(process, rng.uniform(*self._run_s))
        finally:
            self._end_process(process)
            self._note_acks(process)
            self._note_interrupted()
        return True

    def _note_interrupted(self) -> None:
        """Count the activities that the kill interrupted."""
        if self._activities.exists():
            flags = self._activities.read_bytes()
            self.totals.interrupted.update(name for name, flag in zip(ACTIVITIES, flags, strict=True) if flag)
            self._activities.unlink()

    def end(self) -> None:
        """Run one more process that ends cleanly; check the log, and that the table covers all of it."""
        self._corrupt(self.directory)
        table = self._copy_table()
        process = self._start()
        try:
            if not self._check_start(process, table):
                return
            process.send_line("end")
            status = process.wait(END_S_MAX)
            if status != 0:
                self._note_failure(process, f"a process did not end cleanly ({status})")
        finally:
            process.kill()
        log = read_log(self.directory / "log")
        self.totals.verdict.merge(check_log(log, self.history, self.options.producers))
        table = self._copy_table()
        if table is not None:
            self.totals.verdict.merge(check_table(table, log, finished=True))
        self.totals.rows += log.next_offset
        self.totals.rolls += log.segments - 1
        self.totals.unacknowledged += log.next_offset - len(self.history.acked)

    def _start(self) -> ChildProcess:
        self._process_count += 1
        self.directory.mkdir(exist_ok=True)  # a power cut may have removed it
        last = {name: self.history.last.get(name, 0) for name in self.options.producers}
        first_lines = {name: max(line - self.options.overlap_lines, 0) + 1 for name, line in last.items()}
        options, seed = self.options, self._rng.randrange(1 << 30)
        return ChildProcess(
            self._beside("errors"),
            *(
                "-m",
                "benchmarks._crash_writer",
                str(self.directory),
                "--first-lines",
                json.dumps(first_lines),
            ),
            *("--level", options.level, "--seed", str(seed), "--segment-bytes", str(options.segment_bytes)),
            *(["--storage"] if options.storage else []),
            *([] if options.retention_bytes is None else ["--retention-bytes", str(options.retention_bytes)]),
            *("--activities", str(self._activities)),
        )

    def _check_start(self, process: ChildProcess, table: Table | None) -> bool:
        totals = self.totals
        ready = process.ready()
        if ready is None or "ready" not in ready:
            self._note_failure(process, "the service did not start")
            return False
        totals.restarts_s.append(time.monotonic() - process.began)
        open_s = ready["open_s"]
        assert isinstance(open_s, float)
        totals.opens_s.append(open_s)
        totals.cuts += bool(ready["cut_bytes"])
        log = read_log(self.directory / "log")
        totals.verdict.merge(check_service(ready, log, self.options.producers))
        totals.verdict.merge(self.judge(log))
        if table is not None:
            totals.verdict.merge(check_table(table, log))
        return True

    def judge(self, log: Log) -> Verdict:
        """Return the violations of a log of this directory."""
        return check_log(log, self.history, self.options.producers)

    def _note_acks(self, process: ChildProcess, name: str = "") -> None:
        acks, duplicates = self.history.acks, self.history.duplicates
        self.history.note(process.lines, self.totals.verdict, name)
        self.totals.acks += self.history.acks - acks
        self.totals.duplicates += self.history.duplicates - duplicates

    def _let_run(self, process: ChildProcess, time_s: float) -> None:
        if process.wait(time_s) is not None and process.lines:
            self._note_failure(process, "the service ended by itself")

    def _note_failure(self, process: ChildProcess, what: str) -> None:
        self.totals.verdict.add("bad start or end", f"{what}: {process.error_line()}")

    def _copy_table(self) -> Table | None:
        """Read the SQLite file from a copy, as reading the original would recover it."""
        path = self.directory / "vectors.db"
        if not self.options.storage or not path.exists():
            return None
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir()
        for name in ("vectors.db", "vectors.db-wal"):
            if (self.directory / name).exists():
                shutil.copy(self.directory / name, self._scratch / name)
        return read_table(self._scratch / "vectors.db")


class CommandCrashRun(CrashRun):
    """A crash run of the command `delta-prop publish`: in each round the next producer sends its lines,
    always from line 1 on.

    After each kill the command runs without input: it recovers the directory and closes it.
    """

    def run_round(self) -> bool:
        """Run the command, kill it, recover, check. Return False if a command failed."""
        totals, rng = self.totals, self._rng
        totals.rounds += 1
        self._process_count += 1
        name = self.options.producers[self._process_count % len(self.options.producers)]
        process = self._command("--producer", name, "--acks", str(self._write_lines(name)))
        try:
            if rng.random() < self._start_share:
                totals.in_start += 1
                process.wait(rng.uniform(0.0, 1.0))
            elif process.ready() is None:
                self._note_failure(process, "the command did not start")
                return False
            else:
                process.wait(rng.uniform(*self._run_s))
        finally:
            self._end_process(process)
            self._note_acks(process, name)
        return self._recover()

    def end(self) -> None:
        """Count the rows of the log, which was checked after the last kill."""
        rows = read_log(self.directory / "log").rows
        self.totals.rows += len(rows)
        self.totals.unacknowledged += len(rows) - len(self.history.acked)

    def _recover(self) -> bool:
        process = self._command("--producer", "nobody", os.devnull)
        try:
            status = process.wait(END_S_MAX)
            self.totals.restarts_s.append(time.monotonic() - process.began)
            if status != 0:
                self._note_failure(process, f"the command failed ({status})")
                return False
        finally:
            process.kill()
        self.totals.verdict.merge(self.judge(read_log(self.directory / "log")))
        return True

    def _command(self, *arguments: str) -> ChildProcess:
        self.directory.mkdir(exist_ok=True)
        command = ("-m", "delta_prop", "publish", "--data", str(self.directory / "log"))
        return ChildProcess(self._beside("errors"), *command, *arguments)

    def _write_lines(self, name: str) -> Path:
        """Return the file with a producer's lines; write it first if it does not exist."""
        path = self._beside(f"{name}.jsonl")
        if not path.exists():
            deltas = (make_delta(name, line) for line in range(1, COMMAND_LINES + 1))
            path.write_text("".join(f"{json.dumps(delta_to_json(delta))}\n" for delta in deltas))
        return path
