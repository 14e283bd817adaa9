"""Two services behind one producer and one subscriber; each vector is at one of the services.

python examples/spread.py
"""

from __future__ import annotations

import anyio

from delta_prop import Delta, Propagator, opaque
from delta_prop.client import SpreadProducer, SpreadSubscriber
from delta_prop.server.service import Service
from delta_prop.server.settings import ServerSettings


async def main() -> None:
    async with Propagator() as first, Propagator() as second, anyio.create_task_group() as tasks:
        services = []
        for propagator in (first, second):
            # In production, each service is a `delta-prop serve`, one per core or machine.
            address = await tasks.start(Service(propagator, ServerSettings(port=0)).run)
            services.append(f"{address.host}:{address.port}")

        async with SpreadProducer(services, name="writer") as producer:
            ack = await producer.publish(*(Delta(f"note-{n}", opaque(b"new")) for n in range(7)))
            for part in ack.parts:
                print(
                    f"service {part.service_index}: rows {list(part.rows)} from offset {part.ack.offset} on"
                )
            changed = await producer.publish(Delta("note-6", opaque(b"changed")), after=[ack])
            print("note-6 is at service", changed.parts[0].service_index)

        async with SpreadSubscriber(services, "*", start="earliest") as reader:
            received = [await anext(reader) for _ in range(8)]
        for index in range(len(services)):
            vector_ids = [one.delta.vector_id for one in received if one.service_index == index]
            print(f"from service {index}: {', '.join(vector_ids)}")
        tasks.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(main)
