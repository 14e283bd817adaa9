"""A replica for benchmarks of the embedded service: a server in another process, reached over a slow link or
directly.

The link is a program: `python -m benchmarks._embedded_link PORT DELAY_MS` prints a port of its own and
forwards between that port and PORT in both directions; each byte arrives DELAY_MS later.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from benchmarks._peers_ours import Ours

_RECEIVE_BYTES = 256 * 1024


class Replica(Ours):
    """A server with default settings, as the target of forwarding; with `delay_ms`, over a slow link."""

    name = "replica"

    def __init__(self, delay_ms: float = 0.0) -> None:
        super().__init__()
        self._delay_ms = delay_ms

    def start(self, folder: Path) -> None:
        """Start the server, and the link if there is one."""
        super().start(folder)
        if self._delay_ms:
            link_folder = folder / "link"
            link_folder.mkdir()
            arguments = ["-m", "benchmarks._embedded_link", str(self.port), str(self._delay_ms)]
            self.spawn([sys.executable, *arguments], link_folder)
            self.port = self.wait_ready(link_folder)["port"]


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
