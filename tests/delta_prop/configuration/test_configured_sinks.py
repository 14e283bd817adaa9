"""Configured sinks have the defaults of their classes, and are attached at their cursor or at `start`."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from delta_prop.api.propagator import Propagator
from delta_prop.client.forwarding import ForwardLink
from delta_prop.configuration import make_sinks, read_configuration
from delta_prop.configuration.sinks import KINDS, SinkConfig
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_sinks import CacheSink, ForwardSink, IndexSink, JsonLinesSink, ResidentVectors, StorageSink
from delta_prop_wire.delta import Delta, create
from delta_prop_wire.errors import UsageError

SINK_CLASSES: dict[str, type[Any]] = {
    "storage": StorageSink,
    "index": IndexSink,
    "cache": CacheSink,
    "jsonlines": JsonLinesSink,
    "forward": ForwardLink,
}


@pytest.mark.parametrize("kind", KINDS)
def test_sink_defaults_match_the_sink_signatures(kind: str) -> None:
    config, of_sink = KINDS[kind], inspect.signature(SINK_CLASSES[kind]).parameters
    of_resident = inspect.signature(ResidentVectors).parameters
    of_attach = inspect.signature(Propagator.attach).parameters
    common = {field.name for field in dataclasses.fields(SinkConfig)}
    for field in dataclasses.fields(config):
        if field.name in ("path", "topics", "vectors", "to", "authorities", "server_name", "stream"):
            continue
        is_common = field.name in common - {"name"}
        parameters = of_attach if is_common else of_sink if field.name in of_sink else of_resident
        assert field.default == parameters[field.name].default, field.name


def test_sinks_are_made_with_configured_values(tmp_path: Path) -> None:
    text = f"""
        [[sinks]]
        kind = "storage"
        path = "{tmp_path}/facts.db"
        flush_s = 0.5
        [[sinks]]
        kind = "index"
        vectors = "storage"
        [[sinks]]
        kind = "index"
        name = "alone"
        resident_bytes_max = 1000
        [[sinks]]
        kind = "cache"
        entries_max = 7
        [[sinks]]
        kind = "jsonlines"
        path = "{tmp_path}/lines"
        fsync = true
        [[sinks]]
        kind = "forward"
        to = ["127.0.0.1:7373"]
    """
    sinks = [attachment.sink for attachment in make_sinks(read_configuration(text).sinks)]
    storage, index, own_index, cache, lines, forward = sinks
    assert isinstance(forward, ForwardSink)
    assert isinstance(storage, StorageSink)
    assert storage.flush_s == 0.5
    assert isinstance(index, IndexSink)
    assert index.resident is storage.resident
    assert isinstance(own_index, IndexSink)
    assert own_index.resident is not storage.resident
    assert (own_index.name, own_index.resident.resident_bytes_max) == ("alone", 1000)
    assert isinstance(cache, CacheSink)
    assert cache.entries_max == 7
    assert isinstance(lines, JsonLinesSink)
    assert lines.fsync


def test_value_refused_by_sink_is_reported_with_its_path() -> None:
    config = read_configuration("[[sinks]]\nkind = 'cache'\nentries_max = 0").sinks
    with pytest.raises(UsageError, match=r"^sinks\[0\].entries_max 0"):
        make_sinks(config)


def test_all_attach_options_are_passed_on() -> None:
    text = """
        [[sinks]]
        kind = "cache"
        name = "hot"
        topics = ["ns:a", "v:b"]
        start = "latest"
        required = false
        pacing = true
        on_log_full = "invalidate_cursor"
        batch_deltas = 7
        linger_ms = 2.5
        rebuild = true
    """
    received: dict[str, Any] = {}

    class FakePropagator:
        async def attach(self, sink: object, **options: Any) -> None:
            received.update(options)

    (attachment,) = make_sinks(read_configuration(text).sinks)
    run_virtual(lambda: attachment.attach(cast("Any", FakePropagator()), ()))
    assert received == {
        "name": "hot",
        "topics": ("ns:a", "v:b"),
        "start": "latest",
        "required": False,
        "pacing": True,
        "on_log_full": "invalidate_cursor",
        "batch_deltas": 7,
        "linger_ms": 2.5,
        "rebuild": True,
    }


@pytest.mark.parametrize(("remembered", "line_count"), [(set[str](), 1), ({"jsonlines"}, 3)])
def test_start_applies_only_to_a_sink_not_remembered(
    remembered: set[str], line_count: int, tmp_path: Path
) -> None:
    config = read_configuration(
        f"[[sinks]]\nkind = 'jsonlines'\npath = '{tmp_path}/lines'\nstart = 'latest'"
    ).sinks

    async def main() -> None:
        async with Propagator(world=virtual_world()) as p:
            for number in range(2):
                await p.publish(Delta(f"v{number}", create([1.0])))
            (attachment,) = make_sinks(config)
            await attachment.attach(p, remembered)
            await p.wait_visible(await p.publish(Delta("v", create([1.0]))))

    run_virtual(main)
    assert len((tmp_path / "lines").read_text().splitlines()) == line_count


def test_sinks_attached_together_receive_no_delta_if_one_fails(tmp_path: Path) -> None:
    async def main() -> None:
        world = virtual_world()
        async with Propagator(world=world) as p:
            await p.publish(Delta("v", create([1.0])))
            sinks = p.internals().sinks
            first = CacheSink(mode="refresh")

            async def attach_twice() -> None:
                with sinks.attach_together():
                    await p.attach(first, start="earliest")
                    await anyio.sleep(1)
                    await p.attach(first)

            with pytest.raises(UsageError):
                await attach_twice()
            assert p.statistics().sinks["cache"].applied_offset == 0
            before = world.clock.now()
        assert world.clock.now() - before < 1, "the close has waited for sinks that never started"

        async with Propagator(world=virtual_world()) as p:
            await p.publish(Delta("v", create([1.0])))
            with p.internals().sinks.attach_together():
                await p.attach(CacheSink(mode="refresh"), start="earliest")
            await p.wait_visible(1)
            assert p.statistics().sinks["cache"].applied_offset == 1

    run_virtual(main)
