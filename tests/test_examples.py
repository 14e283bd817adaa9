"""Every example runs, and prints the expected output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.delta_prop.server.process import served

EXAMPLES = Path(__file__).parent.parent / "examples"

PRINTED = {
    "quickstart": [
        "nearest: ['pear', 'apple']",
        "cached: [0.  1.  0.5] {'colour': 'green'}",
        "heard: 1 pear 0",
        "heard: 2 pear 1",
        "on disk: 3 deltas",
    ],
    "notebook": ["nearest: point-7", "length: 1.0", "refused: CONFLICT", "accepted: 1002"],
    "streaming": [
        "docs-2: 2 bytes",
        "docs-4: 4 bytes",
        "docs-5: 5 bytes",
        "mail-0: 0 bytes",
        "mail-3: 3 bytes",
        "docs processed below 6",
    ],
    "partitions": [
        "partition 0: rows [1, 4, 5] from offset 0 on",
        "partition 1: rows [0, 2, 3] from offset 0 on",
        "partition 2: rows [6] from offset 0 on",
        "note-6 is in partition 2",
        "while partition 0 is paused: [1, 2]",
        "from partition 0: note-1, note-4, note-5",
        "from partition 1: note-0, note-2, note-3",
        "from partition 2: note-6, note-6",
    ],
    "streams": [
        "note-0: partition 1, offset 0, [0. 1.]",
        "note-1: partition 0, offset 0, [1. 1.]",
        "note-2: partition 1, offset 1, [2. 1.]",
        "note-3: partition 1, offset 2, [3. 1.]",
        "default: 1 partitions, settings {}",
        "notes: 3 partitions, settings {'retention_s': 86400}",
        "partition 1 begins with note-0",
    ],
    "own_sink": ["the sink follows the contract", "{'fruit': 2, 'trees': 1}"],
    "table_sink": [
        "the sink follows the contract",
        "quarantined: cap, price 'dear' is not a number",
        "[('Pen', 3.0)]",
    ],
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )


@pytest.mark.parametrize("name", PRINTED)
def test_example_prints_expected_output(name: str) -> None:
    completed = run(str(EXAMPLES / f"{name}.py"))
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.splitlines() == PRINTED[name]


def test_fixture_example_passes() -> None:
    completed = run("-m", "pytest", "-p", "no:cacheprovider", str(EXAMPLES / "test_with_fixture.py"))
    assert completed.returncode == 0, completed.stdout
    assert "2 passed" in completed.stdout


def test_every_example_is_tested() -> None:
    tested_otherwise = {"asgi_service", "web_worker", "test_with_fixture"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*PRINTED, *tested_otherwise}


# --- the service, called as an ASGI server calls it


class Server:
    """A minimal ASGI server: calls an application as a real server does."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self._to_app, self._messages = anyio.create_memory_object_stream[dict[str, str]](2)
        self._answers, self._from_app = anyio.create_memory_object_stream[dict[str, str]](2)

    async def run_lifespan(self) -> None:
        with self._to_app, self._messages, self._answers, self._from_app:
            await self.app({"type": "lifespan"}, self._messages.receive, self._answers.send)

    async def send_event(self, event: str) -> None:
        await self._to_app.send({"type": f"lifespan.{event}"})
        assert (await self._from_app.receive())["type"] == f"lifespan.{event}.complete"

    async def request(self, method: str, path: str, body: bytes = b"", query: str = "") -> tuple[int, Any]:
        parts = [body[:10], body[10:]]
        messages: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

        async def send(message: dict[str, Any]) -> None:
            messages.append(message)

        scope = {"type": "http", "method": method, "path": path, "query_string": query.encode()}
        await self.app(scope, receive, send)
        return messages[0]["status"], json.loads(messages[1]["body"])


def example(name: str) -> Any:
    """Import an example as a module of its own."""
    specification = spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_asgi_service_finds_posted_vectors(backend: str) -> None:
    module = example("asgi_service")

    async def main() -> None:
        server = Server(module.app)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.run_lifespan)
            await server.send_event("startup")
            for number, vector in enumerate(([1, 0], [0, 1], [1, 1])):
                line = json.dumps({"vector_id": f"v{number}", "op": "create", "vector": vector})
                assert await server.request("POST", "/deltas", line.encode()) == (
                    200,
                    {"offset": number, "duplicate": False},
                )
            status, hits = await server.request("GET", "/nearest", query="vector=0,1&k=2")
            assert status == 200
            assert [hit["vector_id"] for hit in hits] == ["v1", "v2"]
            status, answer = await server.request("POST", "/deltas", b'{"vector_id": "v9", "op": "scale"}')
            assert (status, "factor" in answer["error"]) == (422, True)
            status, answer = await server.request(
                "POST", "/deltas", b'{"vector_id": "v9", "op": "create", "vector": [1, 2, 3]}'
            )
            assert (status, answer["field"]) == (422, "vector")
            assert (await server.request("GET", "/nearest", query="vector=a"))[0] == 400
            assert (await server.request("POST", "/deltas", b" " * 2_000_000))[0] == 400
            assert (await server.request("PUT", "/"))[0] == 404
            await server.send_event("shutdown")

    anyio.run(main, backend=backend)


def test_acknowledged_fact_is_readable_at_every_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker is a separate module here; under a web server it is a separate process."""
    config = tmp_path / "delta-prop.toml"
    config.write_text('[[sinks]]\nkind = "storage"\npath = "facts.db"\n')
    with served(tmp_path / "facts", "--config", str(config)) as service:
        monkeypatch.setenv("DELTA_PROP_SERVICE", f"127.0.0.1:{service.port}")
        monkeypatch.setenv("WORKER_LOCKS", str(tmp_path))
        anyio.run(_check_two_workers)


async def _check_two_workers() -> None:
    first, second, third = (Server(example("web_worker").app) for _ in range(3))
    line = json.dumps({"vector_id": "apple", "op": "create", "vector": [1, 0]}).encode()
    async with anyio.create_task_group() as tasks:
        for worker in (first, second):
            tasks.start_soon(worker.run_lifespan)
            await worker.send_event("startup")
        assert await first.request("POST", "/facts", line) == (200, {"offset": 0, "worker": "web-0"})
        response = await second.request("GET", "/facts/apple")
        assert response == (200, {"vector": [1.0, 0.0], "worker": "web-1"})
        assert (await second.request("GET", "/facts/pear"))[0] == 404
        assert (await second.request("POST", "/facts", b'{"vector_id": "v", "op": "scale"}'))[0] == 422
        await first.send_event("shutdown")
        tasks.start_soon(third.run_lifespan)  # takes the free lock and continues under its own name
        await third.send_event("startup")
        second_line = line.replace(b"create", b"dense")
        assert await third.request("POST", "/facts", second_line) == (200, {"offset": 1, "worker": "web-0"})
        await second.send_event("shutdown")
        await third.send_event("shutdown")
