"""Requests to an HTTP port return JSON, report errors in one sentence, and end within a bounded time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop.commands import http_client
from delta_prop.commands.connect_options import ConnectOptions
from delta_prop.commands.http_client import HttpClient, NoAnswer
from delta_prop.platform.connection_faults import Misconfigured
from delta_prop.testing import VirtualNetwork, run_virtual
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from delta_prop.platform.ports import Stream

OK = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s"


def answer(body: bytes) -> bytes:
    return OK % (len(body), body)


class ScriptedHttpPort:
    """An HTTP port that answers with the given bytes, connection by connection; None closes a connection."""

    def __init__(self, *connections: list[bytes | None]) -> None:
        self.connections = list(connections)
        self.requests: list[bytes] = []

    async def serve(self, stream: Stream) -> None:
        buffer = bytearray(4096)
        for response in self.connections.pop(0):
            if response is None:
                break
            count = await stream.receive_into(memoryview(buffer))
            self.requests.append(bytes(buffer[:count]))
            await stream.send([response])
        else:
            await anyio.sleep_forever()
        await stream.aclose()


def get_answers(
    scripted: ScriptedHttpPort, *paths: str, token: str | None = None, host: str = "10.0.0.9:7374"
) -> list[Any]:
    answers: list[Any] = []
    failures: list[Exception] = []

    async def main() -> None:
        network = VirtualNetwork(1)
        listener = await network.listen("10.0.0.9", 7374)

        async def accept() -> None:
            while True:
                stream = await listener.accept()
                tasks.start_soon(scripted.serve, stream)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(accept)
            try:
                async with HttpClient(network, ConnectOptions((host,), token)) as client:
                    answers.extend([await client.get(path) for path in paths])
            except (NoAnswer, UsageError) as failure:  # the task group would wrap the error
                failures.append(failure)
            tasks.cancel_scope.cancel()

    run_virtual(main)
    for failure in failures:
        raise failure
    return answers


def test_answers_come_over_one_connection() -> None:
    first = answer(b'{"a": 1}')
    scripted = ScriptedHttpPort([first, answer(b"[2]")])
    assert get_answers(scripted, "/api/status", "/api/sinks", token="t-1") == [{"a": 1}, [2]]
    assert scripted.requests[0].startswith(b"GET /api/status HTTP/1.1\r\nHost: 10.0.0.9:7374\r\n")
    assert b"Authorization: Bearer t-1\r\n" in scripted.requests[0]
    assert scripted.requests[1].startswith(b"GET /api/sinks ")


def test_default_port_is_7374() -> None:
    assert get_answers(ScriptedHttpPort([answer(b"[]")]), "/", host="10.0.0.9") == [[]]


def test_closed_connection_is_reopened_once() -> None:
    scripted = ScriptedHttpPort([answer(b"[1]"), None], [answer(b"[2]")])
    assert get_answers(scripted, "/", "/") == [[1], [2]]
    last = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 3\r\n\r\n[1]"
    assert get_answers(ScriptedHttpPort([last], [answer(b"[2]")]), "/", "/") == [[1], [2]]


@pytest.mark.parametrize(
    ("connections", "message"),
    [
        ([[b"HTTP/1.1 401 X\r\nContent-Length: 0\r\n\r\n"]], "an admin's token: give --token-file"),
        ([[b'HTTP/1.1 503 X\r\nContent-Length: 14\r\n\r\n{"error":"no"}']], "with status 503: no"),
        ([[answer(b"no JSON")]], "answers / with status 200"),
        ([[b"HTTP/none\r\n\r\n"]], "cannot be queried"),
        ([[b"\xd3\x01\r\n\r\n"]], "speaks the protocol 0xD3: name the HTTP port"),
        ([[None], [None]], "it ended the connection"),
        ([[]], "did not answer within 10 s"),
        ([[answer(b"[%s]" % (b" " * 100))]], "exceeds 50 bytes"),
    ],
)
def test_invalid_answer_is_reported_in_one_sentence(
    connections: list[list[bytes | None]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "BODY_BYTES_MAX", 50)
    with pytest.raises((NoAnswer, Misconfigured)) as error:
        get_answers(ScriptedHttpPort(*connections), "/")
    assert message in str(error.value)
    assert str(error.value).startswith("10.0.0.9:7374 ")


def test_unknown_token_is_reported() -> None:
    with pytest.raises(
        NoAnswer, match=r"the given one is unknown there or not an admin's.* `token new NAME --admin`"
    ):
        get_answers(ScriptedHttpPort([b"HTTP/1.1 401 X\r\nContent-Length: 0\r\n\r\n"]), "/", token="t")


def test_absent_server_is_reported() -> None:
    with pytest.raises(NoAnswer, match=r"name the HTTP port that `serve` prints as http=…"):
        get_answers(ScriptedHttpPort(), "/", host="10.0.0.9:1")


def test_invalid_address_is_refused() -> None:
    with pytest.raises(UsageError, match="give host:port"):
        get_answers(ScriptedHttpPort(), "/", host="http://x")
