"""A real server killed at each step of a job, and killed tasks and drivers: each delta has one effect."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from delta_prop.client import ClientSettings, SyncProducer
from delta_prop.client.jobs import Decision, JobPart, JobState, JobStatus, StagedPart, decide
from delta_prop.directory.readonly_log import open_readonly_log
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.server.jobs import (
    JOB,
    block_of,
    invalid_delta,
    part_deltas,
    stage,
    wait_published,
    without_rows,
)
from tests.delta_prop.server.process import Served, served
from tests.full_log import read_all

if TYPE_CHECKING:
    from pathlib import Path

PARTS = 3
ROWS = 3_000
"""Rows of each part."""
BLOCK_ROWS = 60
INVALID_ROWS = (17, 2_000, 2_999)
PATIENT = ClientSettings(open_timeout_s=60.0)


def deltas_of(part: int) -> list[object]:
    deltas = part_deltas(part, ROWS)
    for number in INVALID_ROWS if part == 1 else ():
        deltas[number] = invalid_delta(part, number)
    return deltas  # type: ignore[return-value]


EXPECTED_KEYS = [delta.vector_id for part in range(PARTS) for delta in part_deltas(part, ROWS)]
INVALID_KEYS = {f"1-{number}" for number in INVALID_ROWS}
FINAL_STATUS = JobStatus(
    JobState.PUBLISHED, PARTS * ROWS, published=PARTS * ROWS - len(INVALID_ROWS), refused=len(INVALID_ROWS)
)


class RestartingServer:
    """A server that is killed and restarted on the same port."""

    def __init__(self, data: Path, stack: ExitStack) -> None:
        self.data = data
        self._stack = stack
        self.kills = 0
        self.server: Served
        self._start(0)
        self.port = self.server.port
        self.address = f"127.0.0.1:{self.port}"

    def _start(self, port: int) -> None:
        self.server = self._stack.enter_context(served(self.data, port=port))

    def kill(self) -> None:
        self.server.kill()
        self.kills += 1
        self._start(self.port)


def keys_of(data: Path) -> list[str]:
    """Return the vector ids in a stopped server's log."""
    with open_readonly_log(str(data)) as (_, log, _):
        return [key for logged in read_all(log) if not logged.batch.is_control for key in logged.batch.keys]


def stage_with_kill(
    restarting: RestartingServer, part: int, attempt: int, kill_after: int | None
) -> StagedPart:
    """Stage a part; the server is killed after block `kill_after`, and the task continues."""
    deltas = deltas_of(part)
    job_part = JobPart(JOB, part, attempt)
    with SyncProducer(restarting.address, name=f"{JOB}/{part}", job=job_part, settings=PATIENT) as producer:
        for number, start in enumerate(range(0, ROWS, BLOCK_ROWS)):
            producer.offer_block(block_of(deltas[start : start + BLOCK_ROWS]))  # type: ignore[arg-type]
            if number == kill_after:
                restarting.kill()
        producer.flush()
    return StagedPart(part, attempt, ROWS)


def test_server_killed_at_each_job_step_publishes_once(tmp_path: Path, full: bool) -> None:
    rng = random.Random("jobs")
    with ExitStack() as stack:
        restarting = RestartingServer(tmp_path / "data", stack)
        parts = [stage_with_kill(restarting, 0, 1, kill_after=20)]
        restarting.kill()  # between parts
        parts += [stage_with_kill(restarting, part, 1, None) for part in range(1, PARTS)]
        restarting.kill()  # before the decision
        assert decide(restarting.address, JOB, Decision.COMMIT, parts, timeout_s=60).deltas == PARTS * ROWS
        restarting.kill()  # before or during the publishing of the first row
        kills_amid_publishing = 0
        for _ in range(20 if full else 1):
            status = query(restarting)
            if status.state is JobState.PUBLISHED:
                break
            kills_amid_publishing += 0 < status.published < PARTS * ROWS
            time.sleep(rng.uniform(0, 0.02))
            restarting.kill()
        assert without_rows(final := wait_published(restarting.address, timeout_s=60)) == FINAL_STATUS
        assert [(refused.part, refused.row) for refused in final.refused_rows] == [
            (1, number) for number in INVALID_ROWS
        ]
        assert decide(restarting.address, JOB, Decision.COMMIT, parts, timeout_s=60) == final
    assert keys_of(restarting.data) == [key for key in EXPECTED_KEYS if key not in INVALID_KEYS]
    print(f"{restarting.kills} kills, {kills_amid_publishing} of them while publishing")


def query(restarting: RestartingServer) -> JobStatus:
    return decide(restarting.address, JOB, Decision.QUERY, timeout_s=60)


def test_concurrent_attempts_and_dead_driver_publish_once(tmp_path: Path) -> None:
    """Of each part, one attempt is killed, and two run at once; the first driver ends without a decision."""
    with served(tmp_path / "data") as server:
        address = f"127.0.0.1:{server.port}"
        for part in range(2):
            run_killed_task(address, part)
        results: dict[tuple[int, int], StagedPart] = {}

        def run(part: int, attempt: int) -> None:
            results[part, attempt] = stage(address, part, attempt, part_deltas(part, ROWS), block_rows=50)

        threads = [
            threading.Thread(target=run, args=(part, attempt)) for part in range(2) for attempt in (1, 2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert decide(address, JOB, Decision.QUERY).state is JobState.STAGING
        # Here the driver ended. The complete job is run a second time, and commits.
        rerun = [
            stage(address, part, 100 + part, part_deltas(part, ROWS), block_rows=50) for part in range(2)
        ]
        decide(address, JOB, Decision.COMMIT, rerun)
        assert wait_published(address).published == 2 * ROWS
        with pytest.raises(Refused) as refusal:  # as if the first driver were alive after all
            decide(address, JOB, Decision.ABORT)
        assert refusal.value.code is ErrorCode.JOB_DECIDED
        assert (
            decide(address, JOB, Decision.COMMIT, [results[part, 2] for part in range(2)]).deltas == 2 * ROWS
        )
    assert keys_of(tmp_path / "data") == [
        delta.vector_id for part in range(2) for delta in part_deltas(part, ROWS)
    ]
    assert not list((tmp_path / "data" / "jobs").glob("*.part"))


SENDER_SCRIPT = """
import sys
from delta_prop.client import SyncProducer
from delta_prop.client.jobs import JobPart
from tests.delta_prop.server.jobs import JOB, block_of, part_deltas

part = int(sys.argv[2])
with SyncProducer(sys.argv[1], name=f"{JOB}/{part}", job=JobPart(JOB, part, 99)) as producer:
    for begin in range(0, 1_000_000, 50):
        producer.offer_block(block_of(part_deltas(part, 50, begin)))
        if begin == 1_000:
            producer.flush()
            print("well on its way", flush=True)
"""


def run_killed_task(address: str, part: int) -> None:
    """Run a task in a process of its own, which is killed while sending."""
    command = [sys.executable, "-c", SENDER_SCRIPT, address, str(part)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.kill()
