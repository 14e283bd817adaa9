"""SyncPropagator, for scripts and notebooks, called from any thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import pytest

from delta_prop import LogSettings
from delta_prop.api.settings import Settings
from delta_prop.api.synchronous import SyncPropagator
from delta_prop_sinks import CacheSink, CallbackSink, IndexSink, StorageSink
from delta_prop_wire.delta import Delta, create, offset, transform
from delta_prop_wire.errors import InvalidDelta, Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from pathlib import Path


def make_delta(key: str) -> Delta:
    return Delta(key, create([1.0, 2.0]))


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_published_delta_is_visible_in_sinks(backend: str, tmp_path: Path) -> None:
    with SyncPropagator(backend=backend) as p:
        index, storage = p.attach(IndexSink()), p.attach(StorageSink(tmp_path / "vectors.db"))
        p.publish_many(["v", "w"], np.eye(2))
        published = p.publish(Delta("w", offset(1.0)))
        p.wait_visible(published)
        assert p.call(lambda: index.search([1.0, 2.0], k=1))[0].vector_id == "w"
        state = p.call(lambda: storage.get("default", "w"))
        assert state is not None
        assert state.vector is not None
        assert state.vector.tolist() == [1.0, 2.0]
        p.wait_visible(published, sinks=["storage"], committed=True)
        assert p.head("w") == published.dot
        p.detach("index")
        assert list(p.statistics().sinks) == ["storage"]


def test_errors_propagate_unchanged() -> None:
    with SyncPropagator(Settings(log_deltas_max=1)) as p:
        p.attach(CallbackSink(lambda *_: None))
        with pytest.raises(InvalidDelta, match="vector_id"):
            p.publish(make_delta(""))
        with pytest.raises(UsageError, match="no sink named"):
            p.detach("nobody")
        with pytest.raises(Refused, match="larger than the whole log"):
            p.publish(make_delta("a"), make_delta("b"))
        with pytest.raises(ZeroDivisionError):
            p.call(lambda: 1 // 0)


def test_exception_in_block_propagates() -> None:
    def program() -> None:
        with SyncPropagator() as p:
            p.publish(make_delta("a"))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        program()


def test_calls_outside_the_block_are_rejected() -> None:
    p = SyncPropagator()
    with pytest.raises(UsageError, match="with SyncPropagator"):
        p.publish(make_delta("a"))
    with p:
        p.publish(make_delta("a"))
    with pytest.raises(UsageError, match="with SyncPropagator"):
        p.statistics()


def test_open_and_close_replace_the_block() -> None:
    p = SyncPropagator().open()
    with pytest.raises(UsageError, match="open already"):
        p.open()
    with pytest.raises(UsageError, match="on its own loop's thread"):
        p.call(p.close)
    assert p.publish(make_delta("a")).offset == 0
    p.close()
    p.close()
    with pytest.raises(UsageError, match="not open"):
        p.publish(make_delta("b"))


def test_close_error_is_added_as_note_to_block_error() -> None:
    class FaultySink(CallbackSink):
        async def aclose(self) -> None:
            raise OSError("its disk is gone")

    def program() -> None:
        with SyncPropagator() as p:
            p.attach(FaultySink(lambda *_: None))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        program()
    assert caught.value.__notes__ == ["closing the propagator failed too: OSError('its disk is gone')"]
    with pytest.raises(OSError, match="its disk is gone"), SyncPropagator() as p:
        p.attach(FaultySink(lambda *_: None))


def test_log_in_a_directory_persists(tmp_path: Path) -> None:
    log = LogSettings(segment_bytes_max=1 << 20)
    with SyncPropagator(data=tmp_path / "facts", log=log) as p:
        published = p.publish(make_delta("a"), ack_level="durable")
    with SyncPropagator(data=tmp_path / "facts", log=log) as p:
        assert p.recovery is not None
        assert published.dot is not None
        assert p.outcome(published.dot) == 0
        assert p.publish(make_delta("b")).offset == 1


def test_offer_pressure_and_forget_work_as_in_propagator() -> None:
    with SyncPropagator() as p:
        sink = p.attach(CallbackSink(lambda *_: None, name="heard"))
        assert p.sink("heard") is sink
        receipt = p.offer(make_delta("a"))
        p.wait_visible(receipt)
        assert p.call(receipt.wait).offset == 0
        assert p.publish_many(["b"], [[1.0, 2.0]], ack_level="memory").offset == 1
        p.detach("heard")
        p.forget("heard")
        changes = p.pressure_changes()
        assert next(changes) == p.pressure()
        changes.close()  # type: ignore[attr-defined]


def test_threads_publish_concurrently() -> None:
    with SyncPropagator() as p:
        seen: list[int] = []
        p.attach(CallbackSink(lambda at, _: seen.append(at)))
        with ThreadPoolExecutor(8) as pool:
            published = list(pool.map(lambda n: p.publish(make_delta(f"v{n}")), range(200)))
        p.wait_visible(max(ack.next_offset for ack in published))
        assert seen == list(range(200))
        assert len({ack.dot for ack in published}) == 200


def test_second_producer_of_a_name_fences_the_first() -> None:
    with SyncPropagator() as p:
        producer = p.producer("p")
        first = p.publish_as(producer, make_delta("a"))
        p.publish_as(p.producer("p"), make_delta("b"))
        with pytest.raises(Refused, match="give it its own name"):
            p.publish_as(producer, make_delta("c"))
        assert first.dot is not None
        assert p.statistics().accepted == 2


def test_subscribe_iterates_over_matching_deltas() -> None:
    with SyncPropagator() as p:
        deltas = p.subscribe("v:b")
        p.publish(make_delta("a"), make_delta("b"))
        p.publish(make_delta("b"))
        assert [(delivered.offset, delivered.delta.vector_id) for delivered in islice(deltas, 2)] == [
            (1, "b"),
            (2, "b"),
        ]
        deltas.close()  # type: ignore[attr-defined]
        assert not p.statistics().sinks


def test_iteration_in_another_thread_ends_at_close() -> None:
    def read() -> list[str]:
        received = []
        try:
            for delivered in p.subscribe(start="earliest"):
                received.append(delivered.delta.vector_id)
        except Refused as refusal:  # the propagator was closed before all was read
            if refusal.code is not ErrorCode.SHUTTING_DOWN:
                raise
        return received

    with ThreadPoolExecutor(1) as pool:
        with SyncPropagator() as p:
            p.publish(make_delta("a"))
            received = pool.submit(read)
            while not p.statistics().sinks:
                p.publish(make_delta("b"))
        assert received.result(60)[0] == "a"


def test_transform_doubles_the_vector() -> None:
    with SyncPropagator() as p:
        cache = p.attach(CacheSink())
        p.register_transform("double", lambda vector: 2 * vector, reads="cache")
        p.publish(make_delta("v"))
        p.wait_visible(p.publish(Delta("v", transform("double"))))
        state = p.call(lambda: cache.peek("default", "v"))
        assert state is not None
        assert state.vector is not None
        assert state.vector.tolist() == [2.0, 4.0]
