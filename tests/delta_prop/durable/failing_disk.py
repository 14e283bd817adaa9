"""A service in virtual time whose disk fails once, while callers of every kind use it.

A point says which disk call fails, how, and for how long. Run as a module with a printed point, it runs that
point and prints all answers to its callers.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from benchmarks._crash_answers import Answers, Failures, judge, read_log_index
from benchmarks._crash_callers import Caller, embedded_callers, produce, query_outcomes
from benchmarks._crash_clients import BatchClient, DeltaClient, RefusalPolicy, Site
from delta_prop import LogSettings, Propagator, Settings
from delta_prop.client import Producer
from delta_prop.client.settings import ClientSettings
from delta_prop.client.sync_producer import SyncProducer
from delta_prop.server.settings import ServerSettings
from delta_prop.testing import VirtualLoop, VirtualNetwork, virtual_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import AckLevel
from tests.delta_prop.durable.virtual_sockets import VirtualModules, wake
from tests.delta_prop.server.raw import serving

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskGroup

    from benchmarks._crash_check import Verdict
    from delta_prop_simulations.disk import Call

NO_FAILURE = "none"
SYNC_CALLS = ("sync", "sync_directory")
SPACE_CALLS = ("write", "truncate", "allocate")
STRIKES = {
    "write": SPACE_CALLS,
    "short": ("write",),
    "sync": SYNC_CALLS,
    "name": ("rename", "remove", "make_directory", "open"),
    "full": SPACE_CALLS,
    "closed": (*SPACE_CALLS, *SYNC_CALLS),
    "corrupted": (*SPACE_CALLS, *SYNC_CALLS),
    NO_FAILURE: (),
}
"""Kinds of failure, and the disk calls that each may strike.

write, sync, name: the call fails. short: it writes some of its bytes, and the next write finds no space.
full: the disk has no space from that call on, for a while. closed: all calls fail, and the service is closed
before it can recover. corrupted: the call fails, and the log stops for good, as it finds a flipped bit in
synced data. After closed and corrupted the service is restarted on a working disk. none: nothing fails.
"""
OUTAGE_S = 0.15
CALLS_PER_CALLER, PAUSE_S, SHORT_TIMEOUT_S = 4, 0.012, 0.03
WATCH_S = 0.02
PORT = 7373
FLIPPED_AT = 90
"""The position of a byte in the first frame."""
END_S_MAX = 150.0
CLIENT = ClientSettings(close_timeout_s=60.0)
SERVER = ServerSettings(host="server", port=PORT, allow_anonymous=True)


@dataclass(frozen=True, slots=True)
class Point:
    """A failure of the n-th disk call, counted from the start of the callers.

    `times`: how many calls of the kind fail; 0 for all during `OUTAGE_S`. `then`: a second call fails,
    this many calls after the first, e.g. during the recovery; 0 for none. `level`: the read level of the log.
    """

    kind: str
    n: int
    times: int = 1
    then: int = 0
    level: AckLevel = AckLevel.DURABLE
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.n}:{self.times}:{self.then}:{self.level.name.lower()}:{self.seed}"

    @classmethod
    def parse(cls, text: str) -> Point:
        """Return the point that prints as `text`."""
        kind, n, times, then, level, seed = text.split(":")
        return cls(kind, int(n), int(times), int(then), AckLevel[level.upper()], int(seed))

    @property
    def command(self) -> str:
        """The command that reruns this point."""
        return f"./run python -m tests.delta_prop.durable.failing_disk {self}"

    @property
    def restarts_service(self) -> bool:
        """True if the service is restarted after the failure."""
        return self.kind in ("closed", "corrupted")


class Fault:
    """The disk failure of one run. `base`: the number of disk calls before the callers started."""

    def __init__(self, point: Point, disk: SimDisk) -> None:
        self.failed_call: Call | None = None
        self.base = disk.calls
        self._point = point
        self._disk = disk
        self._remaining = 2 if point.kind == "short" else point.times
        self._is_outage = self._remaining == 0
        self._ends_s = 0.0
        self._existing = set(disk.paths())
        self._flipped: tuple[str, int, int] | None = None  # path, position and bit
        self.happened = anyio.Event()

    def set_up(self) -> None:
        """Inject the failure."""
        point, disk = self._point, self._disk
        if point.kind == "full":
            disk.fail(self._fill_disk_before, times=None)
        elif point.kind == "short":
            disk.shorten(lambda call: self.failed_call is None and self._strikes(call))
            disk.fail(lambda call: self._is_later(call) and self._strikes(call), errno.ENOSPC)
        else:
            disk.fail(self._strikes, errno.EIO, times=None)

    async def free_space_later(self) -> None:
        """Free the space `OUTAGE_S` after the failure."""
        await self.happened.wait()
        await anyio.sleep(OUTAGE_S)
        self._disk.capacity_bytes = None

    def heal(self) -> None:
        """End the failure."""
        self._disk.heal()
        self._disk.capacity_bytes = None
        if self._flipped is not None:
            self._disk.flip(*self._flipped)
            self._flipped = None

    def _strikes(self, call: Call) -> bool:
        """Return True if this call fails; the first one starts the failure."""
        point = self._point
        if call.number < self.base + point.n or call.name not in STRIKES[point.kind]:
            return False
        if call.name == "open" and (call.path in self._existing or call.path in self._disk.paths()):
            return False  # the call creates no file
        if self.failed_call is None:
            self._start_failure(call)
        if self._is_outage:
            return anyio.current_time() < self._ends_s
        self._remaining -= 1
        return self._remaining >= 0

    def _is_later(self, call: Call) -> bool:
        return self.failed_call is not None and call.number > self.failed_call.number

    def _start_failure(self, call: Call) -> None:
        point, disk = self._point, self._disk
        self.failed_call, self._ends_s = call, anyio.current_time() + OUTAGE_S
        self.happened.set()
        if point.then:
            second_number = call.number + point.then
            disk.fail(lambda later: later.number >= second_number, errno.EIO)
        if point.kind == "corrupted":
            sealed = [path for path in disk.paths() if path.endswith(".log")][:-1]
            if sealed:
                self._flipped = (sealed[0], *disk.flip(sealed[0], FLIPPED_AT))

    def _fill_disk_before(self, call: Call) -> bool:
        """Take almost all space just before a call that needs some; return False: the disk then decides."""
        if self.failed_call is None and call.number >= self.base + self._point.n and call.name in SPACE_CALLS:
            self._start_failure(call)
            self._disk.capacity_bytes = self._disk.used_bytes + self._disk.rng.choice((0, 40, 400))
        return False


class CountedPace:
    """Paces a few calls, at times drawn from a seed. `ends`: returns True if the caller must end early."""

    def __init__(self, seed: str, calls: int, ends: Callable[[], bool] = lambda: False) -> None:
        self._rng = random.Random(seed)
        self._calls = calls
        self._number = 0
        self._ends = ends

    def has_more(self) -> bool:
        return self._number < self._calls and not self._ends()

    def next(self) -> int:
        self._number += 1
        return self._number

    def pause_s(self) -> float:
        return self._rng.uniform(0, 2 * PAUSE_S)


@dataclass
class FailureRun:
    """One run and its results. `decided_s`: when the last recovery ended, with all outcomes decided."""

    point: Point
    verdict: Verdict = field(init=False)
    disk: SimDisk = field(init=False)
    fault: Fault = field(init=False)
    answers: Answers = field(init=False)
    failures: int = 0
    recoveries: int = 0
    decided_s: float | None = None
    trace: list[Call] = field(default_factory=list)

    def run(self) -> FailureRun:
        """Run the service through the failure; judge the answers."""
        seed = self.point.seed
        self.disk, self._closed, self._stuck = SimDisk(seed), False, ""
        self._running: dict[str, None] = {"sync": None}
        self.network = VirtualNetwork(seed, host="server")
        loops = partial(VirtualLoop, seed, 10 * END_S_MAX)
        with asyncio.Runner(loop_factory=loops) as runner, pytest.MonkeyPatch.context() as patch:
            loop = runner.get_loop()
            self.answers = Answers(loop.time)
            self._begun: asyncio.Future[None] = loop.create_future()
            blocking = VirtualModules(loop, self.network.at("sync"), seed)
            blocking.install(patch)
            service_task = blocking.start(self._serve_all())
            service_task.add_done_callback(lambda _: wake(self._begun))
            loop.run_until_complete(self._begun)
            if not service_task.done():
                self._publish_blocking(blocking)
            del self._running["sync"]
            blocking.wait_for(service_task)
        self._judge()
        return self

    def _judge(self) -> None:
        has_failed_syncs = any(self.disk.fault_counts[f"{name} failed"] for name in SYNC_CALLS)
        surviving_level = AckLevel.DURABLE if has_failed_syncs else AckLevel.LOGGED
        failures = Failures(surviving_level, self.decided_s, has_no_recovery=self.point.restarts_service)
        self.verdict = judge(read_log_index(self.disk), self.answers, failures)
        if self._stuck:
            self.verdict.add("stuck", self._stuck)

    # --- the service

    async def _serve_all(self) -> None:
        async with anyio.create_task_group() as callers:
            await self._serve(callers, run_number=0)
            if self.point.restarts_service:
                self.fault.heal()
                await self._serve(callers, run_number=1)
            callers.cancel_scope.cancel()

    async def _serve(self, callers: TaskGroup, run_number: int) -> None:
        """Run one process of the service, which the callers outlive."""
        is_last = run_number == 1 or not self.point.restarts_service
        world = virtual_world(
            self.point.seed + 1000 * run_number, thread_delay_s_max=0.01, disk=self.disk, network=self.network
        )
        propagator = Propagator(Settings(close_timeout_s=5), data="x", log=self._log(), world=world)
        with suppress(*() if is_last else (OSError,)):  # a failing disk refuses the writes of the close
            async with propagator as p, serving(p, SERVER):
                if run_number == 0:
                    self._start_callers(p, callers)
                await self._watch(p, is_last=is_last)
                if is_last:
                    self.trace = [call for call in self.disk.trace if call.number > self.fault.base]
                    self.fault.heal()
                    await query_outcomes(self.answers.calls, p.outcome)
                self._closed = True

    def _log(self) -> LogSettings:
        return LogSettings(
            read_level=self.point.level,
            segment_bytes_max=4_000,
            bytes_max=10_000_000,
            retention_bytes=10_000_000,
            tail_bytes_max=1,
            free_bytes_min=0,
            reserve_bytes=0,
            checkpoint_frames=40,
        )

    async def _watch(self, p: Propagator, *, is_last: bool) -> None:
        """Count failures and recoveries until all callers are done, or until a close during the failure."""
        failed = False
        # Seconds from the failed call until this process ends.
        close_after_s = self.disk.rng.choice((0.02, 0.06, 0.2)) if self.point.kind == "closed" else 1.0
        while (self._running or (is_last and failed)) and (is_last or close_after_s > 0):
            await anyio.sleep(WATCH_S)
            if anyio.current_time() > END_S_MAX:
                self._stuck = f"{', '.join(self._running)}; the log has failed: {failed}"
                break
            close_after_s -= WATCH_S * (self.fault.failed_call is not None)
            reopening = p.statistics().reopening
            assert reopening is not None
            if failed and not reopening.failed:
                self.decided_s = anyio.current_time()
                self.recoveries += 1
            self.failures += reopening.failed and not failed
            failed = reopening.failed

    # --- callers

    def _start_callers(self, p: Propagator, callers: TaskGroup) -> None:
        """Start all callers, and inject the failure."""
        self.fault = Fault(self.point, self.disk)
        self.fault.set_up()
        callers.start_soon(self.fault.free_space_later)
        self._call_embedded(p, callers)
        self._call_remote(callers)
        wake(self._begun)

    def _start(
        self, callers: TaskGroup, name: str, call: Callable[..., Awaitable[object]], *arguments: Any
    ) -> None:
        async def run_call() -> None:
            await call(*arguments)
            del self._running[name]

        self._running[name] = None
        callers.start_soon(run_call)

    def _pace(self, name: str, calls: int = CALLS_PER_CALLER, *, embedded: bool = False) -> CountedPace:
        return CountedPace(f"{self.point.seed} {name}", calls, ends=lambda: embedded and self._closed)

    def _caller(self, name: str, *, embedded: bool = False, **options: Any) -> Caller:
        pace = self._pace(name, embedded=embedded)
        return Caller(name, self.answers, pace, **{"level": self.point.level, **options})

    def _call_embedded(self, p: Propagator, callers: TaskGroup) -> None:
        for caller, call in embedded_callers(partial(self._caller, embedded=True), SHORT_TIMEOUT_S):
            self._start(callers, caller.name, call, caller, p)

    def _call_remote(self, callers: TaskGroup) -> None:
        for policy in RefusalPolicy:
            name = f"bare-{policy.value}"
            pace = self._pace(name, 2 * CALLS_PER_CALLER)
            bare = BatchClient(name, self.answers, pace, self._site(name), policy)
            self._start(callers, name, bare.run)
        for name in ("deltas", "deltas-ids"):
            pace, with_ids = self._pace(name), name == "deltas-ids"
            deltas = DeltaClient(name, self.answers, pace, self._site(name), with_ids=with_ids)
            self._start(callers, name, deltas.run)
        self._start(callers, "client", self._produce)

    def _site(self, name: str) -> Site:
        return Site(self.network.at(name), ("server", PORT), anyio.current_time)

    async def _produce(self) -> None:
        """Publish with the asynchronous client."""
        world = virtual_world(self.point.seed, network=self.network.at("client"))
        level = self.point.level
        producer = Producer(f"server:{PORT}", name="client", ack_level=level, settings=CLIENT, world=world)
        async with producer:
            await produce(producer, self._caller, SHORT_TIMEOUT_S)

    def _publish_blocking(self, blocking: VirtualModules) -> None:
        """Publish with the client that has no event loop."""
        with SyncProducer(f"server:{PORT}", name="sync", settings=CLIENT) as producer:
            self._caller("sync", timeout_s=SHORT_TIMEOUT_S).publish_blocking(producer, blocking.wait)


def main(arguments: list[str]) -> int:
    """Run one point, and print the answers that its callers got."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    result = FailureRun(Point.parse(arguments[0])).run()
    lines = []
    for call in result.answers.calls:
        for answer in call.answers:
            outcome = answer.offsets if answer.kind == "acknowledged" else f"{answer.code}: {answer.text}"
            lines.append((answer.at_s, f"{call.caller:20} {call.keys[0]:24} {answer.kind} {outcome}"))
    for welcome in result.answers.welcomes:
        lines.append((welcome.at_s, f"{welcome.caller:20} hello reports watermark {welcome.watermark}"))
    for at_s, text in sorted(lines):
        print(f"{at_s:9.4f} s  {text}")
    summary = (
        f"failed {result.fault.failed_call}: {result.failures} failures, recovered {result.recoveries} times"
    )
    print(f"{result.point}: {summary}")
    print("\n".join(result.verdict.examples) or "every answer is correct")
    return 1 if result.verdict.total else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
