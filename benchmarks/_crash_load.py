"""The load of one round on a real disk: callers of every kind publish until all have their outcomes.

Callers over the network run in the calling process. Callers within a service's process run in a process of
their own: `python -m benchmarks._crash_load DIR …` opens DIR, prints `{"ready": …}`, and for each JSON line
on standard input runs a round and prints the answers that its callers got.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from benchmarks._crash_answers import Answers
from benchmarks._crash_callers import Caller, embedded_callers, produce, query_outcomes
from benchmarks._crash_clients import BatchClient, DeltaClient, RefusalPolicy, Site
from benchmarks._crash_writer import print_json
from delta_prop.api.propagator import Propagator
from delta_prop.client import Producer
from delta_prop.client.settings import ClientSettings
from delta_prop.client.sync_producer import SyncProducer
from delta_prop.platform.world import real_world
from delta_prop_broker.log.settings import LogSettings
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import DeltaPropError

KIB = 1024
SEGMENT_BYTES, LOG_BYTES = 256 * KIB, 40 * KIB * KIB
CHECKPOINT_FRAMES = 500
PAUSE_S = 0.004
"""Mean pause between two calls of one caller."""
SHORT_TIMEOUT_S = 0.04
"""Timeout of callers that may give up before the log has recovered."""
QUIET_S_MAX = 60.0
"""Maximum seconds from the last call until all callers have their outcomes and the log has recovered."""
POLL_S = 0.05
CLIENT = ClientSettings(close_timeout_s=60.0)


@dataclass(slots=True)
class LogWatch:
    """The log's failures during one round, as polling sees them. `recovered_s`: the last recovery's time."""

    failures: int = 0
    failed: bool = False
    recovered_s: float | None = None

    def note(self, *, failed: bool) -> None:
        """Record the current state."""
        self.failures += failed and not self.failed
        if self.failed and not failed:
            self.recovered_s = time.monotonic()
        self.failed = failed


class TimedPace:
    """Allows calls until a time, with pauses drawn from a seed."""

    def __init__(self, seed: str, ends_s: float) -> None:
        self._rng = random.Random(seed)
        self._ends_s = ends_s
        self._number = 0

    def has_more(self) -> bool:
        """See `Pace`."""
        return time.monotonic() < self._ends_s

    def next(self) -> int:
        """See `Pace`."""
        self._number += 1
        return self._number

    def pause_s(self) -> float:
        """See `Pace`."""
        return self._rng.uniform(0, 2 * PAUSE_S)


class Round:
    """`busy_s` seconds of calls by callers with names of their own, then a wait until none is in flight."""

    def __init__(self, number: int, busy_s: float, level: AckLevel) -> None:
        self.answers = Answers(time.monotonic)
        self.log_watch = LogWatch()
        self.stuck_callers = ""
        self.connections = 0
        self._number = number
        self._level = level
        self._ends_s = time.monotonic() + busy_s
        self._running: dict[str, None] = {}

    def make_caller(self, name: str, **options: Any) -> Caller:
        """Make a caller, by default at the level of the round."""
        return Caller(
            f"{name}-{self._number}", self.answers, self._pace(name), **{"level": self._level, **options}
        )

    def _pace(self, name: str) -> TimedPace:
        return TimedPace(f"{name} {self._number}", self._ends_s)

    def _start(
        self, tasks: TaskGroup, name: str, call: Callable[..., Awaitable[object]], *arguments: Any
    ) -> None:
        async def run_noted() -> None:
            try:
                await call(*arguments)
            except (DeltaPropError, OSError) as error:  # the caller could not continue
                self.stuck_callers = f"{name}: {error!r}"
            del self._running[name]

        self._running[name] = None
        tasks.start_soon(run_noted)

    async def _wait_until_quiet(
        self, tasks: TaskGroup, has_log_failed: Callable[[], Awaitable[bool]]
    ) -> None:
        """Poll the log until all callers have their outcomes and the log has recovered; end the tasks."""
        while self._running or self.log_watch.failed:
            self.log_watch.note(failed=await has_log_failed())
            if time.monotonic() > self._ends_s + QUIET_S_MAX:
                self.stuck_callers = (
                    f"{', '.join(self._running)}; the log has failed: {self.log_watch.failed}"
                )
                break
            await anyio.sleep(POLL_S)
        self.log_watch.note(failed=await has_log_failed())
        tasks.cancel_scope.cancel()

    # --- within the service's process

    async def run_embedded(self, propagator: Propagator) -> None:
        """Run the round with callers in this process."""

        async def has_log_failed() -> bool:
            reopening = propagator.statistics().reopening
            return reopening is not None and reopening.failed

        async with anyio.create_task_group() as tasks:
            for caller, call in embedded_callers(self.make_caller, SHORT_TIMEOUT_S):
                self._start(tasks, caller.name, call, caller, propagator)
            await self._wait_until_quiet(tasks, has_log_failed)
        await query_outcomes(self.answers.calls, propagator.outcome)

    # --- over the network

    async def run_remote(self, port: int, has_log_failed: Callable[[], Awaitable[bool]]) -> None:
        """Run the round with clients of a service on a port of this machine."""
        network = real_world().network
        assert network is not None
        site = Site(network, ("127.0.0.1", port), time.monotonic)
        bare_clients: list[BatchClient | DeltaClient] = []
        for policy in RefusalPolicy:
            name = f"bare-{policy.value}-{self._number}"
            bare_clients.append(BatchClient(name, self.answers, self._pace(name), site, policy))
        for with_ids in (False, True):
            name = f"deltas-ids-{self._number}" if with_ids else f"deltas-{self._number}"
            bare_clients.append(DeltaClient(name, self.answers, self._pace(name), site, with_ids=with_ids))
        async with anyio.create_task_group() as tasks:
            for client in bare_clients:
                self._start(tasks, client.name, client.run)
            for level in dict.fromkeys((self._level, AckLevel.LOGGED)):
                name = f"client-{level.name.lower()}-{self._number}"
                self._start(tasks, name, self._produce, port, name, level)
            self._start(tasks, "sync", self._publish_blocking, port)
            await self._wait_until_quiet(tasks, has_log_failed)
        self.connections = sum(client.connections for client in bare_clients)

    async def _produce(self, port: int, name: str, level: AckLevel) -> None:
        def make_caller(caller: str, **options: Any) -> Caller:
            return self.make_caller(f"{caller}-{level.name.lower()}", **{"level": level, **options})

        client = Producer(f"127.0.0.1:{port}", name=name, ack_level=level, settings=CLIENT)
        async with client as producer:
            await produce(producer, make_caller, SHORT_TIMEOUT_S)

    async def _publish_blocking(self, port: int) -> None:
        """Run the client without an event loop, on a daemon thread."""
        caller = self.make_caller("sync", timeout_s=SHORT_TIMEOUT_S)

        def publish() -> None:
            with SyncProducer(f"127.0.0.1:{port}", name=caller.name, settings=CLIENT) as producer:
                caller.publish_blocking(producer, time.sleep)

        thread = threading.Thread(target=publish, daemon=True)
        thread.start()
        while thread.is_alive():  # noqa: ASYNC110 - the thread has no event loop
            await anyio.sleep(POLL_S)


def log_settings(*, has_reserve: bool) -> dict[str, Any]:
    """Return the bounds of the log.

    `has_reserve`: it has a reserve, and refuses appends before the disk is full.
    """
    return {
        "segment_bytes_max": SEGMENT_BYTES,
        "bytes_max": LOG_BYTES,
        "retention_bytes": LOG_BYTES,
        "checkpoint_frames": CHECKPOINT_FRAMES,
        "free_bytes_min": 1024 * KIB if has_reserve else 0,
        "reserve_bytes": 1024 * KIB if has_reserve else 0,
    }


def main(arguments: list[str]) -> int:
    """Run rounds in this process until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks._crash_load", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--reserve", action="store_true")
    parser.add_argument("--level", choices=("logged", "durable"), default="durable")
    given = parser.parse_args(arguments)
    anyio.run(_run_rounds, given.directory, given.reserve, AckLevel[given.level.upper()])
    return 0


async def _run_rounds(directory: Path, has_reserve: bool, level: AckLevel) -> None:
    settings = LogSettings(read_level=level, **log_settings(has_reserve=has_reserve))
    async with Propagator(data=directory, log=settings) as propagator:
        print_json(ready=True)
        read_line = partial(anyio.to_thread.run_sync, sys.stdin.readline, abandon_on_cancel=True)
        while line := await read_line():
            request = json.loads(line)
            round_ = Round(request["number"], request["busy_s"], AckLevel[request["level"].upper()])
            await round_.run_embedded(propagator)
            log_watch = round_.log_watch
            print_json(
                answers=round_.answers.to_json(),
                failures=log_watch.failures,
                recovered_s=log_watch.recovered_s,
                stuck=round_.stuck_callers,
            )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
