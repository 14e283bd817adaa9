"""The Node client in streams of several partitions, against a real server and through cut connections."""

from __future__ import annotations

import json
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest

from delta_prop.cli import main
from delta_prop_wire.murmur import murmur2, partition_of
from tests.delta_prop.server.process import Served, served
from tests.test_example_node import cutting_proxy, facts, lines, node

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("node") / "facts") as running:
        yield running


def test_hash_of_vectors_is_that_of_other_clients() -> None:
    names = ["", "hello", "kafka", "21", "foobar", "abc", "größe", "x" * 100]
    script = """
        import { murmur2, partitionOfRow } from "./partition.mjs";
        console.log(JSON.stringify(NAMES.map((name) => murmur2(Buffer.from(name)))));
        console.log(JSON.stringify(NAMES.map((name) => partitionOfRow({ vectorId: `docs:${name}` }, 7))));
    """
    hashes, partitions = lines(
        node("--input-type=module", "--eval", script.replace("NAMES", json.dumps(names)))
    )
    known = (275646681, 2132663229, 3496464228 - (1 << 32), -973932308, -790332482)
    assert hashes == [*known, *(murmur2(name.encode()) for name in names[5:])]
    assert partitions == [partition_of("docs", f"docs:{name}", 7) for name in names]


@pytest.fixture(scope="module")
def orders(server: Served) -> str:
    """Return the name of a stream of three partitions."""
    to = ("--to", f"127.0.0.1:{server.port}")
    assert main(["streams", "create", "orders", "--partitions", "3", *to]) == 0
    assert main(["streams", "create", "single", *to]) == 0
    return "orders"


@pytest.mark.parametrize(("form", "origin"), [("batch", 0x800002), ("delta", 0x900002)])
def test_lines_of_a_stream_arrive_once_in_the_partitions_of_their_vectors(
    server: Served, orders: str, tmp_path: Path, form: str, origin: int
) -> None:
    sent = facts(f"stream-{form}", 200)
    file = tmp_path / "facts.jsonl"
    file.write_text("".join(json.dumps(fact) + "\n" for fact in sent))
    publish = ("publish.mjs", "--stream", orders, "--origin", origin, "--batch", 5, "--form", form, file)
    budgets = [(9_999_999, 9_999_999), (3_000, 9_999_999), (9_999_999, 1_500), (9_999_999, 9_999_999)]
    with cutting_proxy(server.port, [*budgets, (2_000, 9_999_999)]) as port:
        published = node(*publish, "--port", port)
    assert {line["partition"] for line in lines(published)} == {0, 1, 2}
    assert json.loads(published.stderr)["connections"] > 3
    assert lines(node(*publish, "--port", server.port)) == [], "the log has all lines already"
    for partition in range(3):
        expected = [
            fact for fact in sent if partition_of(fact["namespace"], fact["vector_id"], 3) == partition
        ]
        cursor = tmp_path / f"place-{partition}.json"
        read = ("subscribe.mjs", "--stream", orders, "--partition", partition, "--cursor", cursor)
        half = len(expected) // 2
        received: list[dict[str, Any]] = []
        for count in (half, len(expected) - half):
            with cutting_proxy(server.port, [(9_999_999, 2_000)]) as port:
                options = ("--port", port, "--topic", f"ns:stream-{form}", "--form", form, "--count", count)
                received += lines(node(*read, *options))
        own_origin = origin | partition << 4
        assert [line["dot"] for line in received] == [[str(own_origin), n + 1] for n in range(len(expected))]
        assert [line["vector_id"] for line in received] == [fact["vector_id"] for fact in expected]


def test_line_may_go_to_a_named_or_the_only_partition(server: Served, orders: str) -> None:
    text = json.dumps({"vector_id": "v", "namespace": "named", "op": "opaque", "data": "x"}) + "\n"
    published = ("publish.mjs", "--port", server.port, "--origin", 0xA00002)
    (line,) = lines(node(*published, "--stream", orders, "--partition", 2, text=text))
    assert line["counter"] == 1
    assert "partition" not in line
    (line,) = lines(node(*published, "--stream", "single", text=text))
    read = ("subscribe.mjs", "--port", server.port, "--topic", "ns:named", "--count", 1)
    (row,) = lines(node(*read, "--stream", orders, "--partition", 2))
    assert row["dot"] == [str(0xA00022), 1]
    (row,) = lines(node(*read, "--stream", "single"))
    assert row["dot"] == [str(0xA00002), 1]
    (line,) = lines(node(*published, "--partition", 0, text=text))
    (row,) = lines(node(*read))
    assert row["offset"] == line["offset"], "without a stream it is that of the stream `default`"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--stream", "missing"), "UNKNOWN_STREAM"),
        (("--stream", "orders", "--partition", 3), "partition 3: stream orders has 3: name 0 to 2"),
        (("--stream", "orders", "--partition", "x"), "partition NaN: give a number from 0 on"),
        (("--partition", 1), "partition 1: stream default has 1: name 0 to 0"),
    ],
)
@pytest.mark.parametrize("script", ["publish.mjs", "subscribe.mjs"])
def test_unknown_stream_or_partition_is_reported_at_once(
    server: Served, orders: str, script: str, options: tuple[Any, ...], message: str
) -> None:
    started_at = time.monotonic()
    completed = node(script, "--port", server.port, *options, text="")
    assert completed.returncode == 1
    assert message in completed.stderr
    assert time.monotonic() - started_at < 30, "it was retried"


def test_reader_of_several_partitions_has_to_name_one(server: Served, orders: str) -> None:
    completed = node("subscribe.mjs", "--port", server.port, "--stream", orders)
    assert "stream orders has 3 partitions: name one" in completed.stderr
