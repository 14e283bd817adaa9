"""Streams inside a program, without a server: each partition is a propagator of its own.

python examples/streams.py
"""

from __future__ import annotations

from tempfile import TemporaryDirectory

import anyio

from delta_prop import Delta, Streams, create
from delta_prop.sinks import CacheSink
from delta_prop_wire.murmur import partition_of


async def run(data: str) -> None:
    async with Streams(data=data) as streams:
        notes = await streams.create("notes", 3)
        # A partition opens at its first use, and closes with the streams. Each has sinks of its own.
        caches = []
        for number in range(notes.partitions):
            partition = await streams.open("notes", number)
            caches.append(await partition.attach(CacheSink()))

        for n in range(4):
            delta = Delta(f"note-{n}", create([float(n), 1.0]))
            number = partition_of(delta.namespace, delta.vector_id, notes.partitions)
            partition = await streams.open("notes", number)
            ack = await partition.publish(delta)
            await partition.wait_visible(ack)
            note = await caches[number].get(delta.namespace, delta.vector_id)
            assert note is not None
            print(f"{delta.vector_id}: partition {number}, offset {ack.offset}, {note.vector}")

    async with Streams(data=data) as streams:  # the streams and their deltas are on disk
        await streams.alter("notes", {"retention_s": 86_400})
        for stream in streams.catalogue.streams.values():
            print(f"{stream.name}: {stream.partitions} partitions, settings {stream.settings.to_json()}")
        async with (await streams.open("notes", 1)).subscribe("*", start=0) as listener:
            print("partition 1 begins with", (await anext(listener)).delta.vector_id)
        await streams.delete("notes")


def main() -> None:
    with TemporaryDirectory() as data:
        anyio.run(run, f"{data}/data")


if __name__ == "__main__":
    main()
