"""`jobs list`, `jobs show` and `jobs abort`, in a directory that no process serves and at a server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from delta_prop.cli import main
from delta_prop.client.jobs import Decision, decide
from tests.delta_prop.server.jobs import invalid_delta, part_deltas, stage, wait_published
from tests.delta_prop.server.process import served

if TYPE_CHECKING:
    from pathlib import Path

    from tests.delta_prop.commands.support import Command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory that a server has closed, with the published job "over" and the staged job "one"."""
    data = tmp_path_factory.mktemp("jobs") / "facts"
    with served(data) as server:
        address = f"127.0.0.1:{server.port}"
        deltas = [*part_deltas(0, 4), invalid_delta(0, 4)]
        decide(address, "over", Decision.COMMIT, [stage(address, 0, 1, deltas, job="over")])
        wait_published(address, "over")
        for job in ("one", "two"):
            stage(address, 0, 1, part_deltas(0, 5), job=job)
            stage(address, 1, 1, part_deltas(1, 3), job=job)
        assert main(["jobs", "list", "--http", f"127.0.0.1:{server.http_port}", "--json"]) == 0
        assert main(["jobs", "abort", "two", "--to", address]) == 0
        assert main(["jobs", "abort", "over", "--to", address]) == 1
        assert main(["jobs", "show", "one", "--to", address, "--json"]) == 0
        assert main(["jobs", "abort", "one", "--data", str(data)]) == 1, (
            "abort succeeded while a server had locked the directory"
        )
    return data


@pytest.fixture
def command(command: Command, folder: Path) -> Command:
    command.data = folder
    return command


def test_list_shows_the_jobs_of_a_directory(command: Command) -> None:
    result = command("jobs", "list", "--json")
    assert result.status == 0
    jobs = {job["job"]: job for job in result.lines}
    assert {name: (job["state"], job["deltas"]) for name, job in jobs.items()} == {
        "over": ("published", 5),
        "one": ("staging", 8),
    }
    assert (jobs["over"]["published"], jobs["over"]["refused"]) == (4, 1)
    assert jobs["one"]["bytes"] > 0
    lines = command("jobs", "list").out.splitlines()
    assert lines[0].split()[:3] == ["job", "state", "deltas"]
    assert len(lines) == 3
    status = json.loads(command("status", "--json").out)
    assert status["jobs"] == {"published": 1, "staging": 1}


def test_show_prints_a_job_and_refuses_an_unknown_one(command: Command) -> None:
    assert json.loads(command("jobs", "show", "over", "--json").out)["published"] == 4
    shown = command("jobs", "show", "over").out
    assert "published  4\n" in shown
    assert (
        "\n           vector_id 'none-0-4', row 4 of part 0: INVALID_DELTA: vector_id: 'none-0-4' in "
        in shown
    )
    (row,) = json.loads(command("jobs", "show", "over", "--json").out)["refused_rows"]
    assert (row["part"], row["row"], row["vector_id"], row["code"]) == (0, 4, "none-0-4", "INVALID_DELTA")
    assert "is unknown or deleted" in row["text"]
    result = command("jobs", "show", "other")
    assert result.status == 1
    assert result.err.startswith("delta-prop: UNKNOWN_JOB: job 'other': not staged here")


def test_abort_drops_a_staged_job_but_not_a_published_one(command: Command) -> None:
    result = command("jobs", "abort", "over")
    assert (result.status, "JOB_DECIDED" in result.err) == (1, True)
    result = command("jobs", "abort", "one")
    assert (result.status, result.out) == (0, "aborted: job 'one'; its staged parts are removed\n")
    assert [one["job"] for one in command("jobs", "list", "--json").lines] == ["over"]
    assert not list((command.data / "jobs").glob("*.part"))
    assert command("jobs", "abort", "other").status == 1
