"""`serve` prints one line when ready, obeys signals, loses no delta at its end, and reports mistakes."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop.cli import main
from delta_prop.client import StreamProducer
from delta_prop.commands import serve
from delta_prop.configuration import Configuration, read_configuration
from delta_prop.hosting.streams import Streams
from delta_prop.platform import system
from delta_prop.server import access
from delta_prop.server.service import Address
from delta_prop.server.tokens import digest_of
from delta_prop_wire.delta import Delta, opaque
from delta_prop_wire.errors import UsageError
from delta_prop_wire.frames import Ack, BatchFrame, Nack
from delta_prop_wire.murmur import partition_of
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.server.raw import ORIGIN, FrameClient, connected, opaque_batch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

HOST = "127.0.0.1"


@dataclass
class Server:
    """A server in this process: its printed lines, and a function that sends it signals."""

    send: Callable[[int], None]
    lines: list[str] = field(default_factory=list)
    exit_signals: list[int] = field(default_factory=list)
    ports: tuple[int, int] = (0, 0)

    @property
    def address(self) -> Address:
        return Address(HOST, self.ports[0])


@asynccontextmanager
async def serving(configuration: Configuration, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    """Run a server in this process; stop it when the block ends."""
    signal_sender, signal_receiver = anyio.create_memory_object_stream[int](10)
    server, ready = Server(signal_sender.send_nowait), anyio.Event()

    @contextmanager
    def signals() -> Iterator[AsyncIterator[int]]:
        yield signal_receiver

    def put(line: str) -> None:
        server.lines.append(line)
        ready.set()

    monkeypatch.setattr(system, "receive_signals", signals)
    monkeypatch.setattr(system, "put", put)
    monkeypatch.setattr(system, "exit_by_signal", server.exit_signals.append)
    with signal_sender, signal_receiver, anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve.serve, configuration)
            await ready.wait()
            (line,) = server.lines
            match = re.fullmatch(r"ready port=(\d+) http=(\d+)", line)
            assert match
            server.ports = int(match[1]), int(match[2])
            yield server
            server.send(signal.SIGTERM)
    assert len(server.lines) == 1


def make_configuration(tmp_path: Path, text: str = "") -> Configuration:
    top = f"data = '{tmp_path}/facts'\nserver = {{ port = 0, http_port = 0, drain_timeout_s = 1 }}\n"
    return read_configuration(top + text, folder=str(tmp_path))


async def publish(address: Address, count: int) -> None:
    """Publish `count` more deltas."""
    async with connected(address) as producer:
        welcome = (await producer.hello(ORIGIN)).welcome
        assert welcome is not None
        ((_, epoch, watermark),) = welcome.origins
        await producer.send(opaque_batch(watermark + 1, count, epoch=epoch))
        await producer.until_acked(watermark + count)


async def http_get(server: Server, path: str) -> tuple[int, Any]:
    """Send an HTTP GET; return the status and the body."""
    async with await anyio.connect_tcp(HOST, server.ports[1]) as stream:
        await stream.send(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        raw = b"".join([part async for part in stream])
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_published_deltas_reach_sinks_and_survive_a_restart(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configuration = make_configuration(tmp_path, "[[sinks]]\nkind = 'jsonlines'\npath = 'lines'")

    async def test() -> None:
        for end in (2, 4):
            async with serving(configuration, monkeypatch) as server:
                assert (await http_get(server, "/readyz"))[0] == 200
                await publish(server.address, 2)
                status, body = await http_get(server, "/api/status")
                assert (status, body["log"]["next_offset"]) == (200, end)
                async with connected(server.address) as subscriber:
                    await subscriber.hello()
                    await subscriber.subscribe()
                    assert (await subscriber.until(BatchFrame)).sequence == 0

    anyio.run(test, backend=backend)
    lines = (tmp_path / "lines").read_text().splitlines()
    assert [json.loads(line)["offset"] for line in lines] == [0, 1, 2, 3]


def test_sink_of_a_stream_gets_each_partition_in_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "[[sinks]]\nkind = 'jsonlines'\nname = 'audit'\nstream = 'orders'\npath = 'lines.jsonl'"
    configuration = make_configuration(tmp_path, text)

    async def test() -> None:
        with pytest.raises(ExceptionGroup) as caught:
            await serve.serve(configuration)
        assert caught.group_contains(UsageError, match="'orders' does not exist: create it first")
        async with Streams(data=f"{tmp_path}/facts") as streams:
            await streams.create("orders", 2)
        keys = [f"k{number}" for number in range(20)]
        async with serving(configuration, monkeypatch) as server:
            address = f"{server.address.host}:{server.address.port}"
            async with StreamProducer(address, name="p", stream="orders") as p:
                await p.publish(*(Delta(key, opaque(b"x")) for key in keys))
            _, rows = await http_get(server, "/api/sinks")
            assert [(row["stream"], row["partition"], row["name"]) for row in rows] == [
                ("orders", 0, "audit"),
                ("orders", 1, "audit"),
            ]
        for partition in range(2):
            lines = (tmp_path / f"lines-{partition}.jsonl").read_text().splitlines()
            written = [json.loads(line)["vector_id"] for line in lines]
            assert written == [key for key in keys if partition_of("default", key, 2) == partition]

    anyio.run(test)


def test_http_reports_ending_until_the_log_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[tuple[int, Any]] = []

    class Closing(Streams):
        async def __aexit__(self, *error: Any) -> None:
            answers.extend(
                [await http_get(served[0], path) for path in ("/readyz", "/api/status", "/api/sinks")]
            )
            await super().__aexit__(*error)

    served: list[Server] = []
    monkeypatch.setattr(serve, "Streams", Closing)

    async def test() -> None:
        async with serving(make_configuration(tmp_path), monkeypatch) as server:
            served.append(server)

    anyio.run(test)
    assert [status for status, _ in answers] == [503, 200, 200]
    assert answers[0][1]["reason"] == answers[1][1]["reason"] == "it is ending"


def test_shutdown_notifies_clients_and_second_signal_is_immediate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with (
            serving(make_configuration(tmp_path), monkeypatch) as server,
            connected(server.address) as client,
        ):
            await client.hello(ORIGIN)
            server.send(signal.SIGINT)
            nack = await client.until(Nack)
            assert (nack.sequence, nack.code) == (0, ErrorCode.SHUTTING_DOWN)
            assert (server.exit_signals, await client.next()) == ([], None)
        assert server.exit_signals == [signal.SIGTERM]

    anyio.run(test)


def test_signal_before_ready_ends_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def signals() -> Iterator[AsyncIterator[int]]:
        signal_sender, signal_receiver = anyio.create_memory_object_stream[int](1)
        with signal_sender, signal_receiver:
            signal_sender.send_nowait(signal.SIGTERM)
            yield signal_receiver

    monkeypatch.setattr(system, "receive_signals", signals)
    monkeypatch.setattr(system, "put", pytest.fail)
    assert anyio.run(serve.serve, make_configuration(tmp_path)) == 0


def test_sighup_reloads_the_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tmp_path / "tokens.toml"

    def write(*names: str) -> None:
        rights = "publish = true\nadmin = true\nnamespaces = ['*']"
        entries = [f"[[token]]\nname = '{n}'\nsha256 = '{digest_of(n).hex()}'\n{rights}\n" for n in names]
        tokens.write_text("".join(entries))

    async def is_welcomed(first_client: FrameClient, token: str) -> bool:
        answer = await _hello(first_client, token)
        assert isinstance(answer, Ack | Nack)
        return isinstance(answer, Ack)

    async def test() -> None:
        monkeypatch.setattr(access, "POLL_INTERVAL_S", 3_600.0)
        write("first")
        configuration = make_configuration(tmp_path, "[access]\ntokens = 'tokens.toml'")
        async with serving(configuration, monkeypatch) as server:
            assert (await http_get(server, "/api/status"))[0] == 401
            async with connected(server.address) as first_client, connected(server.address) as second_client:
                assert await is_welcomed(first_client, "first")
                assert not await is_welcomed(second_client, "second")
            write("first", "second")
            server.send(signal.SIGHUP)
            with anyio.fail_after(60):  # much less than the polling interval
                while True:
                    async with connected(server.address) as first_client:
                        if await is_welcomed(first_client, "second"):
                            break

    anyio.run(test)


async def _hello(client: FrameClient, token: str) -> object:
    from delta_prop_wire.frames import Hello, Subscribe

    await client.send(Subscribe(1, Hello(token=token)))
    return await client.next()


# --- mistakes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (
            ["--port", "TAKEN"],
            1,
            "stop the process that has it, or give another with --port (or server.port), 0 for any",
        ),
        (["--http-port", "TAKEN"], 1, "with --http-port (or server.http_port)"),
        (["--host", "192.0.2.1", "--allow-anonymous"], 1, "name an address of this machine with --host"),
        (["--host", "0.0.0.0"], 2, "allow_anonymous"),
        (["--port", "70000"], 2, "port = 70000: not a port: give up to 65535"),
        (["--port", "x"], 2, "--port"),
        (["--tokens", "nowhere"], 2, "access.tokens: 'nowhere' cannot be read (No such file or directory)"),
        (["--config", "nowhere"], 2, "the configuration 'nowhere' cannot be read"),
        (["--data", "FILE"], 2, "data: 'FILE' is not a directory: give another path"),
        (["--data", ""], 2, "the name is empty"),
        (["--read-level", "memory"], 2, "--read-level"),
        (
            ["--rebuild", "x"],
            2,
            "--rebuild 'x': the configuration has no such sink: name an existing one (none)",
        ),
    ],
)
def test_serve_mistake_is_reported_in_one_line(
    arguments: list[str],
    status: int,
    message: str,
    folder: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (folder / "FILE").write_text("")
    with socket.create_server((HOST, 0)) as used_port:
        options = [str(used_port.getsockname()[1]) if one == "TAKEN" else one for one in arguments]
        common_options = ["--port", "0", "--http-port", "0", "--log-level", "error"]
        assert main(["serve", "--data", "facts", *common_options, *options]) == status
    captured = capfd.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1), captured
    assert message in captured.err


def test_serve_without_a_directory_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) == 2
    assert "no data directory: give --data DIR" in capsys.readouterr().err


def test_options_override_environment_which_overrides_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "dp.toml"
    file.write_text("data = 'a'\nserver = { port = 1, http_port = 1, heartbeat_interval_s = 1 }")
    monkeypatch.setenv("DELTA_PROP_SERVER__PORT", "2")
    monkeypatch.setenv("DELTA_PROP_SERVER__HTTP_PORT", "2")
    options = {"": {"data": None}, "server": {"port": 3, "host": None}, "logging": {"level": None}}
    read = serve.build_configuration(str(file), options)
    assert (read.server.port, read.server.http_port, read.server.heartbeat_interval_s) == (3, 2, 1)
    assert read.data == str(tmp_path / "a")


# --- a process of its own


def test_serve_process_ends_cleanly_on_sigterm(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = str(tmp_path / "facts")
    verb = [sys.executable, "-m", "delta_prop", "serve", "--data", data, "--port", "0", "--http-port", "0"]
    verb += ["--advertise", "facts.example.net:7373"]
    with subprocess.Popen(verb, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            match = re.fullmatch(r"ready port=(\d+) http=(\d+)\n", process.stdout.readline())
            assert match
            assert main(verb[3:]) == 1
            message = f"process {process.pid}: stop that one, or name another directory"
            assert message in capfd.readouterr().err
            process.send_signal(signal.SIGHUP)
            anyio.run(publish, Address(HOST, int(match[1])), 5)
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out) == (0, "")
    lines = [json.loads(line) for line in err.splitlines()]
    assert [line["message"].partition(":")[0] for line in lines] == ["log new", "serving", "ending", "ended"]
    assert lines[1]["address"] == "facts.example.net:7373"
    assert main(["log", "verify", "--data", data]) == 0
