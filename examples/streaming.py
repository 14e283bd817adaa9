"""Consume deltas from a service; acknowledge each delta once its summary is used.

`streams.map` summarises at most eight at a time, its default.

python examples/streaming.py (needs the extra `streams`)
"""

from __future__ import annotations

import asyncio

import anyio

from delta_prop import Delta, Propagator, opaque, streams
from delta_prop.client import Producer, Subscriber
from delta_prop.server.service import Service
from delta_prop.server.settings import ServerSettings


async def summarise(item: streams.Delivered) -> str:
    await asyncio.sleep(0.01)  # in place of a call to another service
    return f"{item.delta.vector_id}: {len(item.delta.operation.data)} bytes"


async def main() -> None:
    async with Propagator() as p, anyio.create_task_group() as tasks:
        service = Service(p, ServerSettings(port=0))  # in production this is `delta-prop serve`
        address = await tasks.start(service.run)
        server = f"{address.host}:{address.port}"

        async with (
            Producer(server, name="writer") as producer,
            Subscriber(server, "ns:docs", group="summaries", start="earliest", ack="manual") as docs,
            Subscriber(server, "ns:mail", group="summaries of mail", start="earliest", ack="manual") as mail,
        ):
            for number in range(6):
                namespace = "mail" if number % 3 == 0 else "docs"
                producer.offer(Delta(f"{namespace}-{number}", opaque(bytes(number)), namespace))

            both = streams.merge(streams.items(docs), streams.items(mail))
            wanted = streams.filter(both, lambda item: item.delta.vector_id != "docs-1")
            chunks = streams.chunk(streams.map(wanted, summarise), 3, within_s=0.5)
            summaries: list[str] = []
            async for chunk in streams.values(chunks):
                summaries += chunk
                if len(summaries) == 5:
                    break
            print(*sorted(summaries), sep="\n")
            print("docs processed below", docs.cursor and docs.cursor.next_offset)
        service.stop()


if __name__ == "__main__":
    asyncio.run(main())
