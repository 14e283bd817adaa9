"""Delivery in real time, on every event loop that a service may run on."""

from __future__ import annotations

import time
from typing import Any

import anyio
import pytest
import uvloop

from delta_prop import Delta, Propagator, Settings, opaque
from delta_prop.sinks import CallbackSink

LOOPS = pytest.mark.parametrize(
    "loop",
    [
        {"backend": "asyncio"},
        {"backend": "asyncio", "backend_options": {"loop_factory": uvloop.new_event_loop}},
        {"backend": "trio"},
    ],
    ids=["asyncio", "uvloop", "trio"],
)


@LOOPS
def test_stalled_sink_delays_no_other_and_catches_up(loop: dict[str, Any]) -> None:
    async def main() -> None:
        fast_offsets, slow_offsets, read_offsets = list[int](), list[int](), list[int]()
        released = anyio.Event()

        async def stalled(offset: int, _: Delta) -> None:
            await released.wait()
            slow_offsets.append(offset)

        async with Propagator(Settings(mailbox_deltas_max=50)) as p:
            await p.attach(CallbackSink(lambda offset, _: fast_offsets.append(offset), name="fast"))
            await p.attach(CallbackSink(stalled, name="slow"))
            async with p.subscribe() as subscription:
                for number in range(200):
                    last = await p.publish(Delta(f"v{number}", opaque(b"x")))
                await p.wait_visible(last, sinks=["fast"])
                assert slow_offsets == []
                assert p.statistics().sinks["slow"].catching_up
                async for delivered in subscription:
                    read_offsets.append(delivered.offset)
                    if len(read_offsets) == 200:
                        break
            released.set()
            await p.wait_visible(last)
        assert fast_offsets == slow_offsets == read_offsets == list(range(200))

    anyio.run(main, **loop)


@pytest.mark.alone
@LOOPS
def test_first_delta_reaches_idle_sink_without_timer(loop: dict[str, Any]) -> None:
    async def main() -> None:
        took_s: list[float] = []
        async with Propagator() as p:
            await p.attach(CallbackSink(lambda *_: took_s.append(time.perf_counter() - start_s)))
            for _ in range(30):
                await anyio.sleep(0.001)
                start_s = time.perf_counter()
                await p.wait_visible(await p.publish(Delta("v", opaque(b"x"))))
        took_s.sort()
        print(f"first delta: median {took_s[15] * 1e6:.0f} us, shortest {took_s[0] * 1e6:.0f} us")
        assert took_s[0] < 0.003  # a timer would delay all deltas, a busy machine only some

    anyio.run(main, **loop)
