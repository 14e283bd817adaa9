"""Wrong arguments to the Python interface: each is reported at once, by name, with its fix."""

from __future__ import annotations

from functools import partial
from inspect import isawaitable
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop import LogSettings, Propagator, SyncPropagator, transform
from delta_prop.client import Subscriber
from delta_prop.platform.ports import Tls
from delta_prop.testing import RecordedPropagator, run_propagator
from delta_prop_sinks import CacheSink, CallbackSink, Hnsw, IndexSink, JsonLinesSink, StorageSink
from delta_prop_wire.errors import DeltaPropError, UsageError
from tests.delta_prop.support import make_delta

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


# --- the data directory


@pytest.mark.parametrize("data", [5, [], b"w/bb", True, 1.5, "", "a\0b"], ids=repr)
def test_data_that_is_not_a_path_is_rejected_and_creates_nothing(
    data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"^data .*: (give|a \w+ is not a path: give)|^data .* give a path"):
        Propagator(data=data)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [{"settings": {}}, {"log": {}}, {"log": []}], ids=repr)
def test_empty_settings_of_another_class_are_rejected(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"is not a (Log)?Settings: create one with"):
        Propagator(**arguments)


def test_log_settings_without_data_directory_are_rejected() -> None:
    with pytest.raises(UsageError, match=r"log: LogSettings .*: give data=DIR too"):
        Propagator(log=LogSettings())


def test_unusable_data_path_is_rejected_with_the_fix(tmp_path: Path) -> None:
    file = tmp_path / "five.jsonl"
    file.write_text("5\n")

    async def open_data(data: str | Path) -> None:
        async with Propagator(data=data):
            raise AssertionError("the propagator opened")

    for data, message in (
        ("/proc/x", r"'/proc/x': nothing can be created in '/proc' .*: give another path"),
        (file, "five.jsonl' is not a directory: give another path for the data"),
        (file / "below", "five.jsonl' is not a directory: give another path"),
    ):
        with pytest.raises(UsageError, match=message):
            anyio.run(open_data, data)
    assert file.read_text() == "5\n"


# --- calls


SUBSCRIBER = "127.0.0.1:9"
CONSTRUCTORS: dict[str, tuple[Callable[[], object], str]] = {
    "topic of a subscriber": (lambda: Subscriber(SUBSCRIBER, 5), "topic 5 is of type int: give text"),  # type: ignore[arg-type]
    "transform": (lambda: transform(5), "name: 5 is of type int: give text"),  # type: ignore[arg-type]
    "resident of an index": (lambda: IndexSink(resident="x"), "resident 'x' is of type str: give a Resident"),  # type: ignore[arg-type]
    "hnsw dict": (lambda: IndexSink(hnsw={"metric": "x"}), r"hnsw \{.*: give True, False or"),  # type: ignore[arg-type]
    "empty hnsw dict": (
        lambda: IndexSink(hnsw={}),
        r"hnsw \{\} is not a bool or Hnsw: give True, False or",
    ),  # type: ignore[arg-type]
    "hnsw text": (lambda: IndexSink(hnsw="yes"), "hnsw 'yes' is not a bool or Hnsw: give True, False or"),  # type: ignore[arg-type]
    "threads text": (lambda: Hnsw(threads="2"), "threads '2' is of type str: give a number"),  # type: ignore[arg-type]
    "entries": (lambda: CacheSink(entries_max="x"), "entries_max 'x' is of type str: give a number"),  # type: ignore[arg-type]
    "path 5": (lambda: StorageSink(5), "path 5 is of type int: give a file's path as text or Path"),  # type: ignore[arg-type]
    "no path": (
        lambda: StorageSink(None),
        "path None is of type NoneType: give a file's path",
    ),  # type: ignore[arg-type]
    "empty path": (lambda: StorageSink(""), "path '' names no file"),
    "lines": (lambda: JsonLinesSink(5), "path 5 is of type int: give a file's path as text or Path"),  # type: ignore[arg-type]
    "resident of a store": (
        lambda: StorageSink("v", resident=5),
        "resident 5 is of type int: give a Resident",
    ),  # type: ignore[arg-type]
    "authorities": (lambda: Tls(authorities=5), "authorities 5 is of type int: give text"),  # type: ignore[arg-type]
    "name of a callback": (lambda: CallbackSink(print, name=""), 'name "" names no sink'),
    "name 5": (lambda: CacheSink(name=5), "name 5 is of type int: give text"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", CONSTRUCTORS)
def test_constructor_with_wrong_argument_is_rejected(case: str) -> None:
    construct, message = CONSTRUCTORS[case]
    with pytest.raises(DeltaPropError, match=message):
        construct()


async def _await_if_needed(call: Callable[[Any], Any], p: RecordedPropagator) -> None:
    result = call(p)
    if isawaitable(result):
        await result


def _call_with(call: Callable[[Any], Any], value: object, _: RecordedPropagator) -> Any:
    return call(value)


class NamedOnly:
    """A sink that has a name and no methods."""

    name = "without"


class SyncOpenSink(CacheSink):
    """A sink whose `open` is not asynchronous."""

    def open(self, context: Any) -> None:  # type: ignore[override]
        """Do nothing."""


async def double_async(vector: Any) -> Any:
    """Double a vector, asynchronously where a plain function is required."""
    return vector * 2


CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "subscribe 5": (lambda p: p.subscribe(5), "topic 5 is of type int: give text"),
    "subscribe None": (lambda p: p.subscribe(None), "topic None is of type NoneType: give text"),
    "subscribe name": (lambda p: p.subscribe(name=5), "name 5 is of type int: give text"),
    "topics": (lambda p: p.attach(CallbackSink(print), topics=[5]), "topic 5 is of type int: give text"),
    "generator": (
        lambda p: p.publish_many((key for key in "ab"), [[1.0], [2.0]]),
        "type generator has no length",
    ),
    "class": (
        lambda p: p.attach(type("Named", (CacheSink,), {"name": "n"})),
        r"Named is a class: attach a sink made from it, as Named\(\)",
    ),
    "class without name": (lambda p: p.attach(StorageSink), "StorageSink is a class: attach a sink made"),
    "no open": (lambda p: p.attach(NamedOnly()), "has no method open: give a sink"),
    "plain open": (
        lambda p: p.attach(SyncOpenSink(name="p")),
        r"'p': open\(\) is a plain function: define it as",
    ),
    "no name": (lambda p: p.attach(CacheSink(name="d"), name=""), 'name "" names no sink'),
    "twice": (lambda p: p.attach(p.sink("cache")), "attached already, as 'cache': detach it first"),
    "function": (
        lambda p: p.register_transform("n", None, reads="cache"),
        "None cannot be called: give transform",
    ),
    "async transform": (
        lambda p: p.register_transform("n", double_async, reads="cache"),
        "is asynchronous: give transform 'n' a plain function, which is called in a thread and may block",
    ),
    "transform 5": (lambda p: p.register_transform(5, abs, reads="cache"), "name 5 is of type int: give"),
    "reads 5": (lambda p: p.register_transform("n", abs, reads=5), "reads 5 is of type int: give text"),
    "wait_visible": (lambda p: p.wait_visible(-1), "-1: give a publish result"),
    "wait_visible True": (lambda p: p.wait_visible(True), "True: give a publish result"),
    "head": (lambda p: p.head(5), "vector_id 5 is of type int: give text"),
    "head in 5": (lambda p: p.head("a", 5), "namespace 5 is of type int: give text"),
    "get": (lambda p: p.sink("cache").get(5, 5), "namespace 5 is of type int: give text"),
    "peek": (lambda p: p.sink("cache").peek("a", 5), "vector_id 5 is of type int: give text"),
    "search": (lambda p: p.sink("index").search([1.0], namespace=5), "namespace 5 is of type int: give text"),
}


@pytest.mark.parametrize("case", CALLS)
def test_call_with_wrong_argument_is_rejected(case: str) -> None:
    call, message = CALLS[case]

    async def main(p: RecordedPropagator) -> None:
        await p.attach(CacheSink())
        await p.attach(IndexSink())
        with pytest.raises(UsageError, match=message):
            await _await_if_needed(call, p)

    run_propagator(main)


def test_wrong_calls_on_the_loop_of_sync_propagator_are_rejected() -> None:
    with SyncPropagator() as p:
        with pytest.raises(UsageError, match="5 cannot be called: give a function"):
            p.call(5)  # type: ignore[call-overload]
        with pytest.raises(UsageError, match="on its own loop's thread, which would wait for itself"):
            p.call(lambda: p.publish(make_delta("a")))
        assert p.publish(make_delta("a")).offset == 0


OTHER_THREAD = "from another thread than that of its event loop.*SyncPropagator.*anyio.from_thread"


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_calls_from_another_thread_are_rejected(backend: str) -> None:
    async def main() -> None:
        async with Propagator() as p:
            calls: list[Callable[[], object]] = [
                lambda: p.offer(make_delta("a")),
                lambda: p.publish(make_delta("a")).send(None),
                lambda: p.publish_many(["a"], [[1.0]]).send(None),
                lambda: p.head("a"),
            ]
            for call in calls:
                with pytest.raises(UsageError, match=OTHER_THREAD):
                    await anyio.to_thread.run_sync(call)
            receipt = await anyio.to_thread.run_sync(anyio.from_thread.run_sync, p.offer, make_delta("a"))
            assert (await receipt).offset == 0
        with pytest.raises(UsageError, match="is not open"):
            p.offer(make_delta("a"))

    anyio.run(main, backend=backend)


def test_list_instead_of_deltas_is_rejected_with_the_fix() -> None:
    async def main(p: RecordedPropagator) -> None:
        for value in ([make_delta("a")], (make_delta("a"), make_delta("b")), iter([make_delta("a")])):
            for call in (p.offer, p.publish):
                with pytest.raises(UsageError, match=r"is not a Delta: unpack it, as in publish\(\*deltas\)"):
                    await _await_if_needed(partial(_call_with, call, value), p)
        with pytest.raises(UsageError, match="5 is not a Delta: create one with"):
            p.offer(5)  # type: ignore[arg-type]

    run_propagator(main)
