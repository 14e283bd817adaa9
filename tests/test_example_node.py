"""The Node client, written from the protocol page alone: golden frames, connection cuts, credit,
backpressure.

The tests use a real server, through connections that are cut, and a scripted peer that sees each frame of the
client.
"""

from __future__ import annotations

import json
import shutil
import socket
import struct
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop.server.service import Address
from delta_prop_wire.algebra import VectorState, apply
from delta_prop_wire.delta import (
    Delta,
    Kind,
    Operation,
    Source,
    create,
    delete,
    dense,
    metadata_only,
    offset,
    opaque,
    scale,
    sparse,
    sparse_add,
    transform,
)
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.frames import BatchFrame
from delta_prop_wire.spec import FrameType
from delta_prop_wire.stamp import Stamp
from tests.delta_prop.server.process import Served, served
from tests.delta_prop.server.raw import connected
from tests.wire.duplicate_keys import DEEP, with_metadata
from tests.wire.sealing import frame_with_checksum

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

WAIT_S_MAX = 180.0
"""A limit that only a hanging test reaches, in seconds."""
NODE = Path(__file__).parent.parent / "examples" / "node"
GOLDEN = NODE.parent.parent / "docs" / "protocol-golden.json"
FOLDS = GOLDEN.with_name("protocol-golden-folds.json")
STAMPED = "d301010a000000000000001100000188282656c00000000000000000"  # a header and the start of its stamp
CONFIGURATION = """
[settings]
queue_deltas_max = 200

[server]
producer_deltas_credit = 100
"""

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


def node(*arguments: str | int, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = ["node", *map(str, arguments)]
    return subprocess.run(
        command, cwd=NODE, input=text, capture_output=True, text=True, check=False, timeout=WAIT_S_MAX
    )


def lines(completed: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert completed.returncode == 0, completed.stderr
    return [json.loads(line) for line in completed.stdout.splitlines()]


def test_golden_frames_round_trip_to_equal_bytes(tmp_path: Path) -> None:
    completed = node("golden.mjs", GOLDEN)
    count = len(json.loads(GOLDEN.read_text())["frames"])
    assert completed.stdout == f"{count} of {count} golden frames read and written\n", completed.stderr
    altered = tmp_path / "altered.json"
    altered.write_text(GOLDEN.read_text().replace('"lamport": 900', '"lamport": 901', 1))
    assert node("golden.mjs", altered).returncode == 1
    altered.write_text(GOLDEN.read_text().replace(STAMPED, STAMPED[:-1] + "1", 1))
    assert "stamp checksum is" in node("golden.mjs", altered).stderr


def test_golden_histories_fold_to_equal_bytes(tmp_path: Path) -> None:
    completed = node("golden_folds.mjs", FOLDS)
    assert completed.stdout == "200 of 200 golden histories folded\n", completed.stderr
    altered = tmp_path / "altered.json"
    for original, other in (
        ('"ignored": 1', '"ignored": 2'),
        ('"values": "00009040', '"values": "00009140'),
        ('"refused"', '"odd"'),
    ):
        altered.write_text(FOLDS.read_text().replace(original, other, 1))
        completed = node("golden_folds.mjs", altered)
        assert (completed.returncode, completed.stdout.splitlines()[-1]) == (
            1,
            "199 of 200 golden histories folded",
        )


# --- a real server, over connections that are cut


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("node")
    (folder / "server.toml").write_text(CONFIGURATION)
    with served(folder / "facts", "--config", str(folder / "server.toml")) as running:
        yield running


@contextmanager
def cutting_proxy(port: int, budgets: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Yield a port that forwards to `port`. Connection n is cut after `budgets[n]` bytes, up or down;
    connections beyond the budgets are not cut.
    """
    sockets: list[socket.socket] = []

    def carry(source: socket.socket, target: socket.socket, bytes_left: float) -> None:
        try:
            while bytes_left > 0 and (data := source.recv(65_536)):
                target.sendall(data[: int(min(bytes_left, len(data)))])
                bytes_left -= len(data)
        except OSError:
            pass
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        for number in range(100):
            try:
                client, _ = listener.accept()
            except OSError:
                return
            sockets.append(client)  # closed at the end even if the upstream connection fails
            upstream = socket.create_connection(("127.0.0.1", port))
            sockets.append(upstream)
            up, down = budgets[number] if number < len(budgets) else (1e9, 1e9)
            for arguments in ((client, upstream, up), (upstream, client, down)):
                threads.append(threading.Thread(target=carry, args=arguments))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads = [threading.Thread(target=accept)]
        threads[0].start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(WAIT_S_MAX)
            for end in sockets:
                end.close()


def facts(namespace: str, count: int) -> list[dict[str, Any]]:
    rows = []
    for n in range(count):
        fact: dict[str, Any] = {"vector_id": f"doc-{n}", "namespace": namespace}
        kinds: list[dict[str, Any]] = [
            {"op": "create", "values": [n, n + 0.5]},
            {"op": "opaque", "data": f"text {n}"},
            {"op": "create", "values": [1, n], "topics": ["news"], "metadata": {"n": n, "gone": None}},
            {"op": "delete"},
        ]
        rows.append(fact | kinds[n % 4])
    return rows


@pytest.mark.parametrize(("form", "origin"), [("batch", 0x100002), ("delta", 0x200002)])
def test_each_line_arrives_once_through_connection_cuts(
    server: Served, tmp_path: Path, form: str, origin: int
) -> None:
    sent = facts(form, 200)
    file = tmp_path / "facts.jsonl"
    file.write_text("".join(json.dumps(fact) + "\n" for fact in sent))
    publish = ("publish.mjs", "--origin", origin, "--batch", 10, "--form", form, file)
    with cutting_proxy(server.port, [(3_000, 9_999_999), (9_999_999, 250), (9_000, 200)]) as port:
        published = node(*publish, "--port", port)
    assert [line["counter"] for line in lines(published)][:2] == [1, 11]
    counts = json.loads(published.stderr)
    assert counts["connections"] == 4
    assert counts["resent"] > 0
    assert lines(node(*publish, "--port", server.port)) == [], (
        "lines that were published before were acknowledged again"
    )

    subscription = (
        "--topic",
        f"ns:{form}",
        "--form",
        form,
        "--cursor",
        tmp_path / "place.json",
        "--credit",
        30,
    )
    with cutting_proxy(server.port, [(9_999_999, 2_000), (9_999_999, 3_001), (9_999_999, 100)]) as port:
        first = node("subscribe.mjs", "--port", port, *subscription, "--count", 85)
    received = lines(first) + lines(
        node("subscribe.mjs", "--port", server.port, *subscription, "--count", 115)
    )
    assert json.loads(first.stderr)["connections"] == 3
    assert [line["dot"] for line in received] == [[str(origin), n + 1] for n in range(200)]
    for fact, line in zip(sent, received, strict=True):
        fact.pop("metadata", None)
        assert fact == {key: line[key] for key in fact}
    offsets = [line["offset"] for line in received]
    assert offsets == sorted(set(offsets))
    assert [line["lamport"] for line in received] == [
        offset + received[0]["lamport"] - offsets[0] for offset in offsets
    ]


def test_duplicate_metadata_key_stops_no_subscriber(server: Served) -> None:
    async def forward() -> None:
        async with connected(Address("127.0.0.1", server.port)) as forwarder:
            await forwarder.hello(source=Source.REPLICA)
            deltas = [Delta(f"v{row}", create([1.0]), "twice") for row in range(3)]
            batch = with_metadata({1: DEEP}, deltas=deltas, origin=0x700002)
            await forwarder.send(BatchFrame(1, batch, Stamp(10_000, Source.REPLICA), ack_wanted=True))
            await forwarder.until_acked(3)

    anyio.run(forward)
    script = """
        import { Subscriber } from "./delta_prop.mjs";
        const wanted = { topics: ["ns:twice"], start: ["earliest"], credit: [10, 1 << 20] };
        const subscriber = new Subscriber({ port: PORT, ...wanted });
        let count = 0;
        for await (const { vectorId, metadata } of subscriber) {
          const x = metadata?.get("a").get("b").get("x") ?? null;
          console.log(JSON.stringify({ vectorId, x }));
          if (++count === 3) break;
        }
    """
    completed = node("--input-type=module", "--eval", script.replace("PORT", str(server.port)))
    assert [(line["vectorId"], line["x"]) for line in lines(completed)] == [
        ("v0", None),
        ("v1", 2),
        ("v2", None),
    ]


@pytest.mark.parametrize("deltas", ["false", "true"])
def test_subscribed_deltas_fold_to_states_of_algebra(server: Served, deltas: str) -> None:
    changes = [
        *(create([0.1, -0.0]), sparse([], []), scale(0.3), sparse_add([0, 0], [0.1, 0.2]), offset(1e-3)),
        *(sparse([1], [-0.0]), metadata_only(), transform("t"), Operation(40, data=b"later"), delete()),
        *(scale(2), opaque(b""), dense([1.0]), metadata_only(), opaque(b"x")),
    ]
    namespace, origin = f"fold-{deltas}", 0x500002 if deltas == "true" else 0x600002
    rows = [
        (Delta(f"v{count}", change, namespace), pack({"n": n, "o": {"a": n}}) if n % 3 == 0 else None)
        for count in range(1, len(changes) + 1)
        for n, change in enumerate(changes[:count])
    ]
    batches = [
        encode_batch([delta], origin=origin, base=base)
        if patch is None
        else with_metadata({0: patch}, deltas=[delta], origin=origin, base=base)
        for base, (delta, patch) in enumerate(rows, start=1)
    ]

    async def forward() -> None:
        async with connected(Address("127.0.0.1", server.port)) as forwarder:
            await forwarder.hello(source=Source.REPLICA)
            frames = [
                BatchFrame(sequence, batch, Stamp(20_000 + sequence, Source.REPLICA), ack_wanted=True)
                for sequence, batch in enumerate(batches, start=1)
            ]
            for start in range(0, len(frames), 50):  # the server's credit is 100
                await forwarder.send(*frames[start : start + 50])
                await forwarder.until_acked(min(start + 50, len(frames)))

    anyio.run(forward)
    script = """
        import { Subscriber } from "./delta_prop.mjs";
        import { fold, packCanonical } from "./fold.mjs";
        const wanted = { topics: ["ns:fold-DELTAS"], start: ["earliest"], deltas: DELTAS };
        const facts = new Map();
        let count = 0;
        for await (const delta of new Subscriber({ port: PORT, ...wanted })) {
          facts.set(delta.vectorId, [...(facts.get(delta.vectorId) ?? []), delta]);
          if (++count === COUNT) break;
        }
        const hex = (array) =>
          array ? Buffer.from(array.buffer, array.byteOffset, array.byteLength).toString("hex") : null;
        for (const [vectorId, deltas] of facts) {
          const { op, values, data, metadata, last, ignored } = fold(deltas.reverse());
          const content = [op, hex(values), hex(data), packCanonical(metadata).toString("hex")];
          const place = [Number(last.lamport), Number(last.counter), ignored];
          console.log(JSON.stringify([vectorId, ...content, ...place]));
        }
    """
    for word, value in (("PORT", server.port), ("DELTAS", deltas), ("COUNT", len(rows))):
        script = script.replace(word, str(value))
    completed = node("--input-type=module", "--eval", script)
    expected: dict[str, VectorState] = {}
    for counter, batch in enumerate(batches, start=1):
        before = expected.get(batch.keys[0], VectorState())
        expected[batch.keys[0]] = apply(
            before, batch.operation(0), batch.metadata(0), (20_000 + counter, origin, counter)
        )
    assert lines(completed) == [[vector_id, *content_of(state)] for vector_id, state in expected.items()]


def content_of(state: VectorState) -> list[Any]:
    alive, vector, data, metadata = state.content
    assert state.key is not None
    kind = Kind.DELETE if not alive else Kind.CREATE if vector is not None else Kind.OPAQUE
    numbers, raw = (None if value is None else value.hex() for value in (vector, data))
    return [int(kind), numbers, raw, metadata.hex(), state.key[0], state.key[2], state.ignored]


def test_final_refusal_affects_only_its_delta(server: Served) -> None:
    script = """
        import { Producer } from "./delta_prop.mjs";
        const producer = await Producer.open({ port: PORT });
        const publish = (...values) => producer.publish([
          { vectorId: "one", namespace: "refused", op: 0, values: Float32Array.from(values) },
        ]);
        const results = await Promise.allSettled([publish(1), publish(NaN), publish(3)]);
        const codes = results.map(({ reason }) => [reason?.code, reason?.field, reason?.row]);
        console.log(JSON.stringify({ codes, counter: Number(results[2].value.counter) }));
        producer.close();
    """
    completed = node("--input-type=module", "--eval", script.replace("PORT", str(server.port)))
    assert lines(completed) == [
        {"codes": [[None] * 3, ["INVALID_DELTA", "vector", 0], [None] * 3], "counter": 3}
    ]


# --- a scripted peer that sees each frame of the client and its time


def pack(value: Any) -> bytes:
    """Encode a value in the part of msgpack that the peer's answers need."""
    if isinstance(value, dict):
        return bytes([0x80 | len(value)]) + b"".join(pack(key) + pack(item) for key, item in value.items())
    if isinstance(value, list):
        return bytes([0x90 | len(value)]) + b"".join(map(pack, value))
    if isinstance(value, str):
        return bytes([0xA0 | len(value)]) + value.encode()
    if isinstance(value, bytes):
        return bytes([0xC4, len(value)]) + value
    return b"\xcf" + struct.pack(">Q", value)


class Peer:
    """The scripted server's side of one connection."""

    def __init__(self, listener: socket.socket, welcome: dict[str, Any], credit: list[int]) -> None:
        self._socket, _ = listener.accept()
        self._socket.settimeout(WAIT_S_MAX)
        assert self.frame()[0] == 6, "the first frame is not a hello"
        self.answer(
            2,
            {
                "credit": credit,
                "correlation_id": 1,
                "request": "hello",
                "response": {"log": [bytes(16), 1, 0]} | welcome,
            },
        )

    def answer(self, kind: int, fields: dict[str, Any], sequence: int = 0) -> None:
        self.send(frame_with_checksum(FrameType(kind), pack(fields), sequence=sequence))

    def send(self, frame: bytes) -> None:
        self._socket.sendall(frame)

    def frame(self) -> tuple[int, int, bytes]:
        """Return the type, sequence and payload of the next frame."""
        _, _, kind, _, sequence, size = struct.unpack(">BBBBQI", self._read_exactly(16))
        return kind, sequence, self._read_exactly(size)

    def is_silent(self, seconds: float) -> bool:
        """True if nothing arrives for this long."""
        self._socket.settimeout(seconds)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True
        finally:
            self._socket.settimeout(WAIT_S_MAX)
        return False

    def _read_exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self._socket.recv(size - len(data))
            assert part, "the client has closed the connection"
            data += part
        return data

    def close(self) -> None:
        self._socket.close()


@contextmanager
def client(script: str) -> Iterator[tuple[socket.socket, subprocess.Popen[str]]]:
    """Run a script against a listening socket of the test."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S_MAX)
        code = script.replace("PORT", str(listener.getsockname()[1]))
        command = ["node", "--input-type=module", "--eval", code]
        with subprocess.Popen(command, cwd=NODE, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield listener, process
            finally:
                process.kill()


PUBLISHES = """
    import { Producer } from "./delta_prop.mjs";
    const producer = await Producer.open({ port: PORT, origin: 18n, heartbeatMs: 2_000 });
    for (let n = 0; n < 12; n++) producer.publish([{ vectorId: `doc-${n}`, op: 6 }]).catch(() => {});
"""


def test_producer_obeys_credit_backpressure_and_heartbeats() -> None:
    with client(PUBLISHES) as (listener, _process):
        peer = Peer(listener, {"origins": [[18, 1, 0]]}, [3, 1_000_000])
        try:
            assert [peer.frame()[:2] for _ in range(3)] == [(1, 1), (1, 2), (1, 3)]
            assert peer.is_silent(0.2), "a frame came without credit"
            peer.answer(2, {"ranges": [[1, 3, 0, 0]], "credit": [2, 1_000]}, 3)
            assert [peer.frame()[:2] for _ in range(2)] == [(1, 4), (1, 5)]
            # Taken before the answer, so a busy machine can only lengthen the time.
            sent_at = time.monotonic()
            peer.answer(4, {"level": 3, "retry_after_ms": 300}, 1)
            peer.answer(2, {"credit": [1, 1_000_000]}, 3)
            assert peer.frame()[:2] == (1, 6)
            assert time.monotonic() - sent_at > 0.25, (
                "a frame came before the delay of Backpressure had passed"
            )

            sent_at = time.monotonic()
            peer.answer(4, {"level": 2, "rate": 10}, 2)
            peer.answer(2, {"credit": [3, 1_000_000]}, 3)
            assert peer.frame()[:2] == (1, 7)
            assert [peer.frame()[:2] for _ in range(2)] == [(1, 8), (1, 9)]
            assert time.monotonic() - sent_at > 0.15, "more than ten frames per second came"

            sent_at = time.monotonic()
            peer.answer(3, {"code": 8, "text": "full", "retry_after_ms": 150}, 8)
            peer.answer(4, {"level": 0}, 3)
            peer.answer(2, {"credit": [9, 1_000_000]}, 3)
            resent = [peer.frame() for _ in range(4)]
            assert time.monotonic() - sent_at > 0.1, "a frame came before the delay of the refusal had passed"
            assert [sequence for _, sequence, _ in resent] == [10, 11, 12, 13]
            base = 88 - 16  # position of a batch's first counter, without the header
            counters = [struct.unpack_from("<Q", payload, base)[0] for _, _, payload in resent]
            assert counters == [8, 10, 11, 12], "refused rows were not resent before new ones"
            assert peer.frame()[:2] == (5, 1), "the idle client sent no heartbeat"
        finally:
            peer.close()


def test_stopped_producer_resumes_at_another_level() -> None:
    with client(PUBLISHES) as (listener, _process):
        peer = Peer(listener, {"origins": [[18, 1, 0]]}, [1, 1_000_000])
        try:
            assert peer.frame()[:2] == (1, 1)
            for number, level in enumerate((0, 1, 2)):
                peer.answer(4, {"level": 3} | ({"retry_after_ms": 30_000} if level == 1 else {}), 2 * number)
                peer.answer(2, {"credit": [1, 1_000_000]}, number)
                assert peer.is_silent(0.3), "a frame came while the stop held"
                peer.answer(4, {"level": level}, 2 * number + 1)
                assert peer.frame()[:2] == (1, 2 + number)
        finally:
            peer.close()


def test_reconnected_producer_resends_in_the_order_of_counters() -> None:
    body = 88 - 16  # position of a batch's first counter, without the header
    with client(PUBLISHES) as (listener, _process):
        peer = Peer(listener, {"origins": [[18, 1, 0]]}, [3, 1_000_000])
        assert [peer.frame()[1] for _ in range(3)] == [1, 2, 3]
        peer.answer(3, {"code": 8, "text": "full", "retry_after_ms": 30_000}, 1)
        assert peer.is_silent(0.2), "a frame came while the refused batch had to wait"
        peer.close()

        peer = Peer(listener, {"origins": [[18, 1, 0]]}, [4, 1_000_000])
        try:
            sent = [struct.unpack_from("<Q", peer.frame()[2], body)[0] for _ in range(4)]
            assert sent == [1, 2, 3, 4]
        finally:
            peer.close()


PRINTS_OUTCOMES = """
    import { Producer } from "./delta_prop.mjs";
    const producer = await Producer.open({ port: PORT, origin: 18n });
    const rows = (...names) => names.map((vectorId) => ({ vectorId, op: 6 }));
    const results = await Promise.allSettled(
      [rows("a"), rows("b", "c"), rows("d"), rows("e")].map((one) => producer.publish(one)),
    );
    console.log(JSON.stringify(results.map(({ value, reason }) => reason?.code ?? Number(value.offset))));
    producer.close();
"""


def test_duplicate_without_offset_is_not_acknowledged() -> None:
    no_offset = (1 << 63) - 1
    with client(PRINTS_OUTCOMES) as (listener, process):
        peer = Peer(listener, {"origins": [[18, 1, 0]]}, [100, 1_000_000])
        try:
            assert [peer.frame()[1] for _ in range(4)] == [1, 2, 4, 5]
            peer.answer(2, {"ranges": [[1, 1, 7, 1], [2, 2, no_offset, 1], [3, 3, 9, 1]]}, 3)
            peer.answer(3, {"code": 28, "text": "the outcome is unknown"}, 4)
            peer.answer(2, {"ranges": [[5, 5, 10, 0]]}, 5)
            assert process.stdout is not None
            outcomes = json.loads(process.stdout.readline())
            assert outcomes == [7, "OUTCOME_UNKNOWN", "OUTCOME_UNKNOWN", 10]
        finally:
            peer.close()


SUBSCRIBES = """
    import { Subscriber } from "./delta_prop.mjs";
    const subscriber = new Subscriber({ port: PORT, start: ["earliest"], credit: [10, 99999] });
    for await (const { offset, lamport, counter } of subscriber) {
      console.log(JSON.stringify([offset, lamport, counter].map(Number)));
    }
"""


def test_subscriber_reads_slices_and_resumes_after_noops() -> None:
    golden = {
        frame["name"]: bytes.fromhex(frame["hex"]) for frame in json.loads(GOLDEN.read_text())["frames"]
    }
    granted = {"subscription": 1, "batch_deltas_max": 100, "wait_ms_max": 10}
    with client(SUBSCRIBES) as (listener, process):
        assert process.stdout is not None
        peer = Peer(listener, {}, [1, 1])
        kind, sequence, request = peer.frame()
        assert (kind, pack("earliest") in request) == (6, True)
        response = granted | {"start": [bytes(16), 1, 0]}
        peer.answer(2, {"correlation_id": sequence, "request": "subscribe", "response": response})
        sliced, noops = golden["batch cut by a filter"], golden["batch of void dots"]
        peer.send(sliced + noops)
        assert [json.loads(process.stdout.readline()) for _ in range(2)] == [[17, 900, 5], [19, 902, 7]]
        for end, frame in ((20, sliced), (22, noops)):
            kind, _, payload = peer.frame()
            assert kind == 2
            assert b"\xa9processed" + bytes([end]) in payload
            assert payload[:-4].endswith(bytes([len(frame) & 0xFF])), (
                "the client granted credit for another number of bytes"
            )
            assert b"\xa6credit\x92\x02" in payload
        peer.close()

        peer = Peer(listener, {}, [1, 1])  # the same client reconnects
        assert b"\xa6cursor\x93\xc4\x10" + bytes(16) + b"\x01\x16" in peer.frame()[2], (
            "the client did not resume at offset 22"
        )
        peer.close()
        process.kill()
        assert process.stdout.read() == "", "no-op rows were printed"
