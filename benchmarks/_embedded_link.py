"""A replica for benchmarks of the embedded service: a server in another process, reached over a slow link or
directly.

The link is a program: `python -m benchmarks._embedded_link PORT DELAY_MS` prints a port of its own and
forwards between that port and PORT in both directions; each byte arrives DELAY_MS later.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks._peers_contract import WAIT_S_MAX, Peer

if TYPE_CHECKING:
    from typing import Self

_RECEIVE_BYTES = 256 * 1024


class Replica(Peer):
    """A `delta-prop serve` with default settings, as the target of forwarding."""

    name = "replica"

    def __init__(self, folder: Path, *, delay_ms: float = 0.0) -> None:
        super().__init__()
        self._folder, self._delay_ms = folder, delay_ms

    def __enter__(self) -> Self:
        serve = ["-m", "delta_prop", "serve", "--data", str(self._folder / "data"), "--read-level", "logged"]
        try:
            self.port = self._start_and_read_port("serve", [*serve, "--port", "0", "--http-port", "0"])
            if self._delay_ms:
                link = ["-m", "benchmarks._embedded_link", str(self.port), str(self._delay_ms)]
                self.port = self._start_and_read_port("link", link)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *failure: object) -> None:
        self.stop()

    def _start_and_read_port(self, name: str, arguments: list[str]) -> int:
        """Start a process and return the port that it prints once it is ready."""
        folder = self._folder / name
        folder.mkdir(parents=True)
        process = self.spawn([sys.executable, *arguments], folder)
        began = time.monotonic()
        while time.monotonic() < began + WAIT_S_MAX and process.poll() is None:
            for line in (folder / "output").read_text().splitlines():
                if line.startswith("ready "):
                    return int(dict(word.split("=") for word in line.split()[1:])["port"])
            time.sleep(0.05)
        raise TimeoutError(f"{name} is not ready: {(folder / 'output').read_text()}")


async def link(port: int, delay_s: float) -> None:
    """Forward connections until cancelled."""

    async def forward(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        loop, in_transit = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]]()

        async def send() -> None:
            while True:
                due, data = await in_transit.get()
                await asyncio.sleep(due - loop.time())
                target.write(data)
                await target.drain()
                if not data:
                    target.close()
                    return

        sending = asyncio.create_task(send())
        while data := await source.read(_RECEIVE_BYTES):
            in_transit.put_nowait((loop.time() + delay_s, data))
        in_transit.put_nowait((loop.time() + delay_s, b""))
        await sending

    async def on_connection(client_reader: asyncio.StreamReader, client_writer: asyncio.StreamWriter) -> None:
        service_reader, service_writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            await asyncio.gather(
                forward(client_reader, service_writer), forward(service_reader, client_writer)
            )
        except ConnectionError:
            service_writer.close()
            client_writer.close()

    server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
    print(f"ready port={server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(link(int(sys.argv[1]), float(sys.argv[2]) / 1000))
