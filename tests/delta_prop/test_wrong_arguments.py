"""Wrong arguments to the Python interface: each is reported at once, by name, with its cure."""

from __future__ import annotations

from functools import partial
from inspect import isawaitable
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop import LogSettings, Propagator, SyncPropagator, transform
from delta_prop.client import Subscriber
from delta_prop.ports import Tls
from delta_prop.testing import RecordedPropagator, run_propagator
from delta_prop_sinks import CacheSink, CallbackSink, Hnsw, IndexSink, JsonLinesSink, StorageSink
from delta_prop_wire.errors import DeltaPropError, UsageError
from tests.delta_prop.support import made

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


# --- where the log is kept


@pytest.mark.parametrize("data", [5, [], b"w/bb", True, 1.5, "", "a\0b"], ids=repr)
def test_data_that_is_no_path_is_refused_and_makes_nothing(
    data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"^data .*: (give|a \w+ is not a path: give)|^data .* give a path"):
        Propagator(data=data)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("given", [{"settings": {}}, {"log": {}}, {"log": []}], ids=repr)
def test_empty_settings_of_another_class_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"is not a (Log)?Settings: create one with"):
        Propagator(**given)


def test_log_settings_without_a_directory_are_refused() -> None:
    with pytest.raises(UsageError, match=r"log: LogSettings .*: give data=DIR too"):
        Propagator(log=LogSettings())


def test_a_place_where_no_directory_can_be_is_told_with_its_cure(tmp_path: Path) -> None:
    file = tmp_path / "five.jsonl"
    file.write_text("5\n")

    async def opened(data: str | Path) -> None:
        async with Propagator(data=data):
            raise AssertionError("it opened")

    for data, told in (
        ("/proc/x", r"'/proc/x': nothing can be created in '/proc' .*: give another path"),
        (file, "five.jsonl' is not a directory: give another path for the data"),
        (file / "below", "five.jsonl' is not a directory: give another path"),
    ):
        with pytest.raises(UsageError, match=told):
            anyio.run(opened, data)
    assert file.read_text() == "5\n"


# --- calls


SUBSCRIBER = "127.0.0.1:9"
MADE: dict[str, tuple[Callable[[], object], str]] = {
    "topic of a subscriber": (lambda: Subscriber(SUBSCRIBER, 5), "topic 5 is a int: give text"),  # type: ignore[arg-type]
    "transform": (lambda: transform(5), "name: 5 is a int: give text"),  # type: ignore[arg-type]
    "resident of an index": (lambda: IndexSink(resident="x"), "resident 'x' is a str: give a Resident"),  # type: ignore[arg-type]
    "linked table": (lambda: IndexSink(hnsw={"metric": "x"}), r"hnsw \{.*: give True, False or"),  # type: ignore[arg-type]
    "empty linked table": (
        lambda: IndexSink(hnsw={}),
        r"hnsw \{\} is not a bool or Hnsw: give True, False or",
    ),  # type: ignore[arg-type]
    "linked text": (lambda: IndexSink(hnsw="yes"), "hnsw 'yes' is not a bool or Hnsw: give True, False or"),  # type: ignore[arg-type]
    "linked number": (lambda: Hnsw(threads="2"), "threads '2' is a str: give a number"),  # type: ignore[arg-type]
    "entries": (lambda: CacheSink(entries_max="x"), "entries_max 'x' is a str: give a number"),  # type: ignore[arg-type]
    "path 5": (lambda: StorageSink(5), "path 5 is a int: give text or a Path"),  # type: ignore[arg-type]
    "no path": (lambda: StorageSink(None), "path None is a NoneType: give text or a Path"),  # type: ignore[arg-type]
    "empty path": (lambda: StorageSink(""), "path '' names no file"),
    "lines": (lambda: JsonLinesSink(5), "path 5 is a int: give text or a Path"),  # type: ignore[arg-type]
    "resident of a store": (lambda: StorageSink("v", resident=5), "resident 5 is a int: give a Resident"),  # type: ignore[arg-type]
    "authorities": (lambda: Tls(authorities=5), "authorities 5 is a int: give text"),  # type: ignore[arg-type]
    "name of a callback": (lambda: CallbackSink(print, name=""), 'name "" names no sink'),
    "name 5": (lambda: CacheSink(name=5), "name 5 is a int: give text"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", MADE)
def test_what_is_made_with_a_wrong_argument(what: str) -> None:
    make, told = MADE[what]
    with pytest.raises(DeltaPropError, match=told):
        make()


async def _awaited(call: Callable[[Any], Any], p: RecordedPropagator) -> None:
    answer = call(p)
    if isawaitable(answer):
        await answer


def _call_with(call: Callable[[Any], Any], wrong: object, _: RecordedPropagator) -> Any:
    return call(wrong)


class Without:
    """A sink that has a name alone."""

    name = "without"


class Plain(CacheSink):
    """A sink whose `open` was meant to be asynchronous."""

    def open(self, context: Any) -> None:  # type: ignore[override]
        """Nothing."""


async def doubled(vector: Any) -> Any:
    """Compute what a plain function should."""
    return vector * 2


CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "subscribe 5": (lambda p: p.subscribe(5), "topic 5 is a int: give text"),
    "subscribe None": (lambda p: p.subscribe(None), "topic None is a NoneType: give text"),
    "subscribe name": (lambda p: p.subscribe(name=5), "name 5 is a int: give text"),
    "topics": (lambda p: p.attach(CallbackSink(print), topics=[5]), "topic 5 is a int: give text"),
    "generator": (
        lambda p: p.publish_many((one for one in "ab"), [[1.0], [2.0]]),
        "a generator has no length",
    ),
    "class": (
        lambda p: p.attach(type("Named", (CacheSink,), {"name": "n"})),
        r"Named is a class: attach a sink made from it, as Named\(\)",
    ),
    "class without name": (lambda p: p.attach(StorageSink), "StorageSink is a class: attach a sink made"),
    "no open": (lambda p: p.attach(Without()), "has no method open: give a sink"),
    "plain open": (lambda p: p.attach(Plain(name="p")), r"'p': open\(\) is a plain function: define it as"),
    "no name": (lambda p: p.attach(CacheSink(name="d"), name=""), 'name "" names no sink'),
    "twice": (lambda p: p.attach(p.sink("cache")), "attached already, as 'cache': detach it first"),
    "function": (
        lambda p: p.register_transform("n", None, reads="cache"),
        "None cannot be called: give transform",
    ),
    "async transform": (
        lambda p: p.register_transform("n", doubled, reads="cache"),
        "is asynchronous: give transform 'n' a plain function, which is called in a thread and may block",
    ),
    "transform 5": (lambda p: p.register_transform(5, abs, reads="cache"), "name 5 is a int: give text"),
    "reads 5": (lambda p: p.register_transform("n", abs, reads=5), "reads 5 is a int: give text"),
    "wait_visible": (lambda p: p.wait_visible(-1), "-1: give a publish result"),
    "wait_visible True": (lambda p: p.wait_visible(True), "True: give a publish result"),
    "head": (lambda p: p.head(5), "vector_id 5 is a int: give text"),
    "head in 5": (lambda p: p.head("a", 5), "namespace 5 is a int: give text"),
    "get": (lambda p: p.sink("cache").get(5, 5), "namespace 5 is a int: give text"),
    "peek": (lambda p: p.sink("cache").peek("a", 5), "vector_id 5 is a int: give text"),
    "search": (lambda p: p.sink("index").search([1.0], namespace=5), "namespace 5 is a int: give text"),
}


@pytest.mark.parametrize("what", CALLS)
def test_a_call_with_a_wrong_argument(what: str) -> None:
    call, told = CALLS[what]

    async def main(p: RecordedPropagator) -> None:
        await p.attach(CacheSink())
        await p.attach(IndexSink())
        with pytest.raises(UsageError, match=told):
            await _awaited(call, p)

    run_propagator(main)


def test_calls_on_the_loop_of_a_sync_propagator() -> None:
    with SyncPropagator() as p:
        with pytest.raises(UsageError, match="5 cannot be called: give a function"):
            p.call(5)  # type: ignore[call-overload]
        with pytest.raises(UsageError, match="on its own loop's thread, which would wait for itself"):
            p.call(lambda: p.publish(made("a")))
        assert p.publish(made("a")).offset == 0


OTHER_THREAD = "from another thread than that of its event loop.*SyncPropagator.*anyio.from_thread"


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_calls_from_another_thread_than_the_loops(backend: str) -> None:
    async def main() -> None:
        async with Propagator() as p:
            calls: list[Callable[[], object]] = [
                lambda: p.offer(made("a")),
                lambda: p.publish(made("a")).send(None),
                lambda: p.publish_many(["a"], [[1.0]]).send(None),
                lambda: p.head("a"),
            ]
            for call in calls:
                with pytest.raises(UsageError, match=OTHER_THREAD):
                    await anyio.to_thread.run_sync(call)
            receipt = await anyio.to_thread.run_sync(anyio.from_thread.run_sync, p.offer, made("a"))
            assert (await receipt).offset == 0
        with pytest.raises(UsageError, match="is not open"):
            p.offer(made("a"))

    anyio.run(main, backend=backend)


def test_a_list_where_deltas_are_wanted_is_told_to_unpack_it() -> None:
    async def main(p: RecordedPropagator) -> None:
        for wrong in ([made("a")], (made("a"), made("b")), iter([made("a")])):
            for call in (p.offer, p.publish):
                with pytest.raises(UsageError, match=r"is not a Delta: unpack it, as in publish\(\*deltas\)"):
                    await _awaited(partial(_call_with, call, wrong), p)
        with pytest.raises(UsageError, match="5 is not a Delta: create one with"):
            p.offer(5)  # type: ignore[arg-type]

    run_propagator(main)
