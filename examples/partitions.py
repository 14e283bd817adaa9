"""A stream of three partitions, with one producer and one subscriber of all of them.

python examples/partitions.py
"""

from __future__ import annotations

from tempfile import TemporaryDirectory

import anyio

from delta_prop import Delta, Streams, opaque
from delta_prop.client import StreamProducer, StreamSubscriber
from delta_prop.server.service import Service
from delta_prop.server.settings import ServerSettings


async def run(data: str) -> None:
    async with Streams(data=data) as streams, anyio.create_task_group() as tasks:
        # In production, this is `delta-prop serve --data DIR` and `delta-prop streams create`.
        await streams.create("notes", 3)
        at = await tasks.start(Service(streams, ServerSettings(port=0)).run)
        address = f"{at.host}:{at.port}"

        async with StreamProducer(address, name="writer", stream="notes") as producer:
            ack = await producer.publish(*(Delta(f"note-{n}", opaque(b"new")) for n in range(7)))
            for part in ack.parts:
                print(f"partition {part.partition}: rows {list(part.rows)} from offset {part.ack.offset} on")
            changed = await producer.publish(Delta("note-6", opaque(b"changed")), after=[ack])
            print("note-6 is in partition", changed.parts[0].partition)

        async with StreamSubscriber(address, "*", stream="notes", start="earliest") as reader:
            reader.pause(0)
            count = sum(len(part.rows) for part in ack.parts if part.partition != 0) + 1
            received = [await anext(reader) for _ in range(count)]
            print("while partition 0 is paused:", sorted({one.partition for one in received}))
            reader.resume(0)
            received += [await anext(reader) for _ in range(8 - count)]
        for partition in range(reader.partitions):
            vector_ids = [one.delta.vector_id for one in received if one.partition == partition]
            print(f"from partition {partition}: {', '.join(vector_ids)}")
        tasks.cancel_scope.cancel()


def main() -> None:
    with TemporaryDirectory() as data:
        anyio.run(run, f"{data}/data")


if __name__ == "__main__":
    main()
