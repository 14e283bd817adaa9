"""The comparison with other servers: clients read streams wherever these are split; ratios are correct."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import struct
from typing import TYPE_CHECKING

import pytest

from benchmarks import _peers_contract, _peers_kafka, _peers_nats, _peers_redis, peers
from benchmarks._peers_calls import publish_singly, raw_calls
from benchmarks._peers_contract import Wire
from benchmarks._peers_goals import (
    BULK,
    COMPARISONS,
    FAN_OUT,
    FLOW,
    LIMITS,
    RATE,
    SCENES,
    Limits,
    Rounds,
    judge,
    peers_for,
)
from benchmarks._peers_ours import KEYS, Frames, RawConsumer, payloads_of
from benchmarks._peers_scenes import Measurement, Scene
from benchmarks._results import Results
from benchmarks.peers import report
from delta_prop_wire.codec import decode, encode
from delta_prop_wire.crc import crc32c
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import AckLevel, Delta, make_origin, opaque
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.frames import Ack, BatchFrame, Heartbeat, OriginGrant
from delta_prop_wire.validate import validate_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import ModuleType

    from benchmarks._peers_contract import Consumer

PAYLOADS = [bytes((number,)) * 8 + b"\r\n$8\r\n*2\r\nMSG ::" for number in range(5)]
STAMPS = b"".join(payload[:8] for payload in PAYLOADS)
SIZE = len(PAYLOADS[0])


@pytest.fixture
def socket_pair() -> Iterator[tuple[socket.socket, Wire]]:
    """A connection: the server's socket and the client's `Wire`."""
    server, client = socket.socketpair()
    yield server, Wire(client)
    server.close()
    client.close()


def nats(wire: Wire) -> Consumer:
    consumer = _peers_nats._Consumer.__new__(_peers_nats._Consumer)
    consumer._wire, consumer._subject = wire, b"s"
    consumer._message = _peers_nats.message_pattern(SIZE)
    return consumer


def redis(wire: Wire) -> Consumer:
    consumer = _peers_redis._Consumer.__new__(_peers_redis._Consumer)
    consumer._wire, consumer._topic, consumer._group = wire, b"t", b"g"
    consumer._read, consumer._entries_left = b"READ", 0
    consumer._entry = _peers_redis.entry_pattern(SIZE)
    return consumer


def ours(wire: Wire) -> RawConsumer:
    consumer = RawConsumer.__new__(RawConsumer)
    consumer._wire, consumer._log = wire, Cursor(bytes(16), 1, 0)
    consumer._unacked, consumer._acked_at = 0, 0.0
    consumer._size, consumer._counter = SIZE, 0
    return consumer


def kafka(wire: Wire) -> Consumer:
    return _peers_kafka._Consumer(wire, wire, "t", 0, SIZE)


def nats_stream() -> bytes:
    messages = [
        b"MSG t 1 $JS.ACK.%d %d\r\n%b\r\n" % (i, len(payload), payload) for i, payload in enumerate(PAYLOADS)
    ]
    return b"PING\r\n" + b"".join(messages[:3]) + b"PONG\r\n" + b"".join(messages[3:])


def redis_stream() -> bytes:
    def answer(payloads: list[bytes]) -> bytes:
        entries = b"".join(
            b"*2\r\n$4\r\n1-%02d\r\n*2\r\n$1\r\nd\r\n$%d\r\n%b\r\n" % (i, len(payload), payload)
            for i, payload in enumerate(payloads)
        )
        return b"*1\r\n*2\r\n$1\r\nt\r\n*%d\r\n%b" % (len(payloads), entries)

    return b"*-1\r\n" + answer(PAYLOADS[:2]) + b":2\r\n" + answer(PAYLOADS[2:])


def our_stream() -> bytes:
    first, rest = (
        [Delta("k", opaque(payload)) for payload in payloads] for payloads in (PAYLOADS[:1], PAYLOADS[1:])
    )
    frames = [
        BatchFrame(offset, encode_batch(deltas, origin=1, base=offset + 1))
        for offset, deltas in ((0, first), (1, rest))
    ]
    return (
        encode(frames[0]) + encode(Heartbeat(1, sent_us=5)) + encode(Ack(0, processed=1)) + encode(frames[1])
    )


def kafka_stream(payload_count: int = len(PAYLOADS), base: int = 0) -> bytes:
    def answer(records: bytes) -> bytes:
        body = struct.pack(">iii", 0, 0, 1) + _peers_kafka.text_of("t")
        body += struct.pack(">iihqqi", 1, 0, 0, 5, 5, -1) + struct.pack(">i", len(records)) + records
        return len(body).to_bytes(4, "big") + body

    batches = []
    for at, payload in enumerate(PAYLOADS[:payload_count], base):
        batches.append(at.to_bytes(8, "big") + _peers_kafka.batch_of(payload, 1)[8:])
    cut_off = batches[-1][:-1]  # an answer of limited size ends anywhere
    return answer(b"") + answer(b"".join(batches[:2]) + cut_off) + answer(b"".join(batches[2:]))


@pytest.mark.parametrize(
    ("client", "stream", "answer"),
    [
        (nats, nats_stream(), b"PONG\r\nPUB $JS.ACK.4 4\r\n+ACK\r\n"),
        (redis, redis_stream(), b"READ" + 2 * (b"*%d\r\n$4\r\nXACK" % 5)),
        (kafka, kafka_stream(), _peers_kafka.request_of((1, 4), _peers_kafka._fetch_of("t", 0))),
        (ours, our_stream(), encode(Ack(0, cursor=Cursor(bytes(16), 1, 5)))),
    ],
)
def test_consumer_reads_payloads_wherever_stream_is_split(
    client: Callable[[Wire], Consumer], stream: bytes, answer: bytes, socket_pair: tuple[socket.socket, Wire]
) -> None:
    server, wire = socket_pair
    for step in (len(stream), 1, 7, 50):
        consumer, stamps = client(wire), b""
        for start in range(0, len(stream), step):
            server.sendall(stream[start : start + step])
            stamps += consumer.receive()
        assert stamps == STAMPS
        assert not wire.unread
        reply = server.recv(1 << 16)
        if step == len(stream) and client in (nats, ours):
            assert reply == answer
        assert reply.startswith(answer[:4])


def test_our_raw_frames_are_valid_and_hold_given_fields() -> None:
    origin = make_origin(7, 2)
    frames = Frames("topic", OriginGrant(origin, 3, 0), AckLevel.LOGGED, (5, len(PAYLOADS[0])))
    keys = set()
    for counter in (1, 6, 1_000_001):
        frame = decode(bytes(frames.frame(counter, b"".join(PAYLOADS))))
        assert isinstance(frame, BatchFrame)
        batch = frame.batch
        assert (frame.sequence, batch.base, batch.origin, batch.epoch) == (counter, counter, origin, 3)
        assert (batch.count, batch.ack_level, batch.namespace) == (5, AckLevel.LOGGED, "topic")
        assert frame.ack_wanted
        assert batch.homogeneous
        validate_batch(batch)
        assert payloads_of(batch) == PAYLOADS
        keys.update(batch.keys)
    assert 5 < len(keys) <= KEYS


def test_our_consumer_reports_gap_and_wrong_row_size(socket_pair: tuple[socket.socket, Wire]) -> None:
    server, wire = socket_pair
    gap, wrong_size, larger = (ours(wire) for _ in range(3))
    gap._counter, wrong_size._size, larger._size = 1, SIZE - 8, 1 << 20
    for consumer, message in ((gap, "from 1, expected 2"), (wrong_size, "without"), (larger, "without")):
        server.sendall(our_stream())
        with pytest.raises(RuntimeError, match=message):
            consumer.receive()
        wire.unread = b""


def test_kafka_batches_are_as_its_format_says() -> None:
    batch = _peers_kafka.batch_of(b"12345678rest", 70)
    base, length, _, version, checksum = struct.unpack_from(">qiibI", batch)
    assert (base, length, version, checksum) == (0, len(batch) - 12, 2, crc32c(batch[21:]))
    attributes, last_offset, *_, producer, epoch, sequence, count = struct.unpack_from(">hiqqqhii", batch, 21)
    assert (attributes, last_offset, producer, epoch, sequence, count) == (0, 69, -1, -1, -1, 70)
    first, last = b"\x24\0\0\0\x01\x1812345678rest\0", b"\x26\0\0\x8a\x01\x01\x1812345678rest\0"
    assert batch[61:].startswith(first + first[:3] + b"\x02")
    assert batch.endswith(last)
    calls = _peers_kafka.Calls("topic")
    assert calls.encode(b"12345678", 3)[-3:] == b"78\0"
    calls.encode(b"12345678", 2)
    answer = bytes(57)
    counts = [calls.count_acks(part) for part in (answer[:5], answer[5:] + answer[:56], answer[56:])]
    assert counts == [0, 3, 2]


def test_kafka_error_gap_and_wrong_size_are_raised(socket_pair: tuple[socket.socket, Wire]) -> None:
    server, wire = socket_pair
    answers = _peers_kafka.Answers(6, 4)
    assert answers.count(bytes(6)) == 1
    with pytest.raises(RuntimeError, match="error 3"):
        answers.count(bytes(5) + b"\x03")
    wrong_size = _peers_kafka._Consumer(wire, wire, "t", 0, SIZE + 8)
    for consumer, stream in ((kafka(wire), kafka_stream(base=1)), (wrong_size, kafka_stream())):
        server.sendall(stream)
        with pytest.raises(RuntimeError, match="Kafka: a batch from"):
            consumer.receive()
        wire.unread = b""


def test_missing_jars_of_kafka_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_peers_kafka, "_JARS", tmp_path)
    monkeypatch.setattr(_peers_kafka.Kafka, "program", "sh")
    assert "mvn -f benchmarks/kafka.xml" in (_peers_kafka.Kafka().missing_program() or "")
    (tmp_path / "kafka_2.13-1.jar").touch()
    assert _peers_kafka.Kafka().missing_program() is None


@pytest.mark.parametrize("module", [_peers_nats, _peers_redis])
def test_server_error_is_raised(module: ModuleType) -> None:
    assert module.count_acks(b"") == 0
    with pytest.raises(RuntimeError, match="no"):
        module.count_acks(b"-ERR no\r\n")


def test_single_calls_respect_window_and_raise_failures() -> None:
    async def play() -> None:
        open_calls, open_calls_max = 0, 0

        async def call(payload: bytes) -> None:
            nonlocal open_calls, open_calls_max
            open_calls += 1
            open_calls_max = max(open_calls_max, open_calls)
            await asyncio.sleep(0)
            open_calls -= 1

        count, ended, took = await publish_singly(call, b"body", seconds=0.01, window=3)
        assert count == len(took) > 3
        assert ended
        assert (open_calls, open_calls_max) == (0, 3)

        async def fail(payload: bytes) -> None:
            raise RuntimeError("no")

        with pytest.raises(ExceptionGroup):
            await publish_singly(fail, b"body", seconds=5, window=3)

    asyncio.run(play())


def test_raw_connection_counts_answers_after_greeting() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"x":1}\r\n')
        received = await reader.readexactly(len(b"HELLO" + b"one two "))
        assert received == b"HELLOone two "
        writer.write(b"PING\r\n{")
        assert await reader.readexactly(6) == b"PONG\r\n"
        writer.write(b"{")
        await writer.drain()
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        ended.set()

    ended = asyncio.Event()

    async def play() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with raw_calls(
            port, lambda payload: payload + b" ", lambda received: received.count(b"{"), hello=b"HELLO"
        ) as call:
            await asyncio.wait_for(asyncio.gather(call(b"one"), call(b"two")), 5)
        await asyncio.wait_for(ended.wait(), 5)
        server.close()

    asyncio.run(play())


def measurement(rate: float, p50_us: float, lost: int = 0) -> Measurement:
    counters = {
        'delta_prop_duplicate_deltas_total{lane="normal"}': 7.0,
        "delta_prop_nacks_total": 1.0,
    }
    return Measurement(
        100, lost, 0, rate, rate, p50_us, p50_us, 1.0, p50_us, 3.0, payloads=100, counters=counters
    )


def rounds(**figures: tuple[float, float]) -> Rounds:
    return {
        (scene.name, name.replace("_", "-")): {number: measurement(*figure) for number in range(3)}
        for scene in (FLOW, FAN_OUT, RATE, BULK)
        for name, figure in figures.items()
    }


def ratios(peer_rounds: Rounds, limits: Limits | None = None) -> dict[str, list[float]]:
    return {goal.what: values for goal, values in judge(peer_rounds, limits or {}, 1_000_000).items()}


def test_ratio_uses_rounds_of_both_peers() -> None:
    peer_rounds = rounds(ours=(8.0, 3.0), jetstream=(2.0, 2.0))
    peer_rounds[FLOW.name, "ours"][1] = measurement(10.0, 3.0)
    del peer_rounds[FLOW.name, "jetstream"][2]
    by_goal = ratios(peer_rounds, {0: {"tcp": 16.0}, 2: {"tcp": 32.0}})
    assert by_goal["publish to receive, rate: ours / jetstream"] == [4.0, 5.0]
    assert by_goal["publish to receive, server CPU a delta: ours / jetstream"] == [1.5, 1.5]
    assert by_goal["2,000 a second, p99: ours / jetstream"] == [1.5] * 3
    assert by_goal["publish to receive, rate: ours / redis"] == []
    assert by_goal["bulk to one receiver, rate: ours / best loopback TCP"] == [0.5, 0.25]
    assert not any(what.startswith("single") for what in by_goal), (
        "there is a goal of a scene that was not played"
    )


def test_every_scene_has_a_goal_and_known_peers() -> None:
    assert peers_for(FLOW) == {"ours", "jetstream", "redis", "ours-durable", "redis-always", "kafka"}
    assert peers_for(BULK) == {"ours", "best loopback TCP"}
    assert {scene.name for scene in SCENES} == {comparison.scene.name for comparison in COMPARISONS}
    peers_and_limits = {*peers.PEERS, *LIMITS, ""}
    assert {comparison.theirs for comparison in COMPARISONS} <= peers_and_limits


def report_rounds(peer_rounds: Rounds, limits: Limits | None = None) -> Results:
    results = Results("peers", calibration_ns=50.0)
    report(
        results, peer_rounds, limits or {}, {name: peers.PEERS[name]() for name in ("ours", "jetstream")}, 128
    )
    return results


def test_exit_status_reflects_losses_and_missed_goals(capsys: pytest.CaptureFixture[str]) -> None:
    fine = report_rounds(rounds(ours=(28.0, 0.1), jetstream=(2.0, 2.0)), {0: {"tcp": 1e-3, "sync": 1.0}})
    assert fine.finish(None) == 0
    printed = capsys.readouterr().out
    assert "delta-prop raw: published 1,200, lost 0, duplicates 84\n" in printed
    assert re.search(
        r"3  publish to receive, rate: ours / jetstream +>= 13 × +>= 18 × +14 \(14-14\) +reached", printed
    )
    assert re.search(r"tcp +0.001 \(0.001-0.001\)", printed)
    short = report_rounds(rounds(ours=(24.0, 0.1), jetstream=(2.0, 2.0)))
    assert short.finish(None) == 0
    assert "short" in capsys.readouterr().out
    far = report_rounds(rounds(ours=(4.0, 0.1), jetstream=(2.0, 2.0)))
    assert far.finish(None) == 1
    lossy = rounds(ours=(14.0, 0.1))
    lossy[FLOW.name, "ours"][0] = measurement(14.0, 0.1, lost=1)
    assert report_rounds(lossy).finish(None) == 1
    assert "FAILED: 1 deltas were lost" in capsys.readouterr().out


def test_missing_peer_is_named_and_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_peers_nats.JetStream, "program", "no-such-program")
    assert peers.main(["--peers", "jetstream", "--rounds", "1", "--no-limits"]) == 0
    assert "JetStream raw is skipped: no-such-program is not installed" in capsys.readouterr().err


def test_user_cpu_excludes_system_calls() -> None:
    def spent(work: Callable[[], object]) -> tuple[float, float]:
        user, both = _peers_contract.user_cpu_s(os.getpid()), _peers_contract.cpu_s(os.getpid())
        while _peers_contract.cpu_s(os.getpid()) < both + 0.3:
            work()
        return _peers_contract.user_cpu_s(os.getpid()) - user, _peers_contract.cpu_s(os.getpid()) - both

    user, both = spent(lambda: sum(range(1_000_000)))
    assert 0.6 * both < user < 1.1 * both
    with open("/dev/zero", "rb", buffering=0) as zeros:
        user, both = spent(lambda: zeros.read(1 << 24))
    assert user < 0.5 * both


def test_server_is_found_in_administrator_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = tmp_path / "nats-server"
    server.write_text("#!/bin/sh\necho started $*\n")
    monkeypatch.setattr(_peers_contract, "PATHS", str(tmp_path))
    monkeypatch.setenv("PATH", "/nonexistent")
    peer = _peers_nats.JetStream()
    assert peer.missing_program() == "nats-server", "a file that is not executable was accepted"
    server.chmod(0o755)
    assert peer.missing_program() is None
    assert peer.spawn([peer.program, "-c", "x"], tmp_path).wait(20) == 0
    assert (tmp_path / "output").read_text() == "started -c x\n"


def test_timed_scenes_are_marked() -> None:
    assert [scene.name for scene in SCENES if scene.is_timed] == [RATE.name, "idle to idle"]
    assert Scene("s", 1, rate=1.0).is_timed
