"""The harness beside other servers: its clients read bytes however they are cut, its ratios are right."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from benchmarks import _peers_nats, _peers_redis, peers
from benchmarks._peers_contract import Wire
from benchmarks._peers_ours import KEYS, Frames, _Consumer, payloads_of
from benchmarks._peers_scenes import Measured, Scene
from benchmarks.peers import FAN_OUT, FLOW, IDLE, Floor, Rounds, ratios, report
from delta_prop_wire.codec import decode, encode
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import AckLevel, Delta, make_origin, opaque
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.frames import Ack, BatchFrame, Heartbeat, OriginGrant
from delta_prop_wire.validate import plain_is_sound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks._peers_contract import Consumer

PAYLOADS = [bytes((number,)) * 8 + b"\r\n$8\r\n*2\r\nMSG " for number in range(5)]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, Wire]]:
    """A server's end and a client's."""
    server, client = socket.socketpair()
    yield server, Wire(client)
    server.close()
    client.close()


def nats(wire: Wire) -> Consumer:
    consumer = _peers_nats._Consumer.__new__(_peers_nats._Consumer)
    consumer._wire, consumer._subject = wire, b"s"
    return consumer


def redis(wire: Wire) -> Consumer:
    consumer = _peers_redis._Consumer.__new__(_peers_redis._Consumer)
    consumer._wire, consumer._topic, consumer._group = wire, b"t", b"g"
    consumer._read, consumer._left = b"READ", 0
    return consumer


def ours(wire: Wire) -> Consumer:
    consumer = _Consumer.__new__(_Consumer)
    consumer._wire, consumer._log = wire, Cursor(bytes(16), 1, 0)
    consumer._unacked, consumer._acked_at = 0, 0.0
    return consumer


def said_by_nats() -> bytes:
    messages = [b"MSG t 1 $JS.ACK.%d %d\r\n%b\r\n" % (i, len(one), one) for i, one in enumerate(PAYLOADS)]
    return b"PING\r\n" + b"".join(messages[:3]) + b"PONG\r\n" + b"".join(messages[3:])


def said_by_redis() -> bytes:
    def answer(ones: list[bytes]) -> bytes:
        entries = b"".join(
            b"*2\r\n$4\r\n1-%02d\r\n*2\r\n$1\r\nd\r\n$%d\r\n%b\r\n" % (i, len(one), one)
            for i, one in enumerate(ones)
        )
        return b"*1\r\n*2\r\n$1\r\nt\r\n*%d\r\n%b" % (len(ones), entries)

    return b"*-1\r\n" + answer(PAYLOADS[:2]) + b":2\r\n" + answer(PAYLOADS[2:])


def said_by_us() -> bytes:
    first, rest = ([Delta("k", opaque(one)) for one in some] for some in (PAYLOADS[:1], PAYLOADS[1:]))
    frames = [BatchFrame(at, encode_batch(some, origin=1, base=1)) for at, some in ((0, first), (1, rest))]
    return (
        encode(frames[0]) + encode(Heartbeat(1, sent_us=5)) + encode(Ack(0, dealt_with=1)) + encode(frames[1])
    )


@pytest.mark.parametrize(
    ("client", "said", "answer"),
    [
        (nats, said_by_nats(), b"PONG\r\nPUB $JS.ACK.4 4\r\n+ACK\r\n"),
        (redis, said_by_redis(), b"READ" + 2 * (b"*%d\r\n$4\r\nXACK" % 5)),
        (ours, said_by_us(), encode(Ack(0, cursor=Cursor(bytes(16), 1, 5)))),
    ],
)
def test_a_consumer_finds_the_payloads_wherever_the_bytes_are_cut(
    client: Callable[[Wire], Consumer], said: bytes, answer: bytes, pair: tuple[socket.socket, Wire]
) -> None:
    server, wire = pair
    for step in (len(said), 1, 7, 50):
        consumer, found = client(wire), []
        for at in range(0, len(said), step):
            server.sendall(said[at : at + step])
            found += consumer.receive()
        assert found == PAYLOADS
        assert not wire.rest
        told = server.recv(1 << 16)
        if step == len(said) and client is not redis:
            assert told == answer
        assert told.startswith(answer[:4])


def test_our_raw_frames_are_sound_and_say_what_was_given() -> None:
    origin = make_origin(7, 2)
    frames = Frames("topic", OriginGrant(origin, 3, 0), AckLevel.LOGGED, (5, len(PAYLOADS[0])))
    keys = set()
    for counter in (1, 6, 1_000_001):
        frame = decode(bytes(frames.frame(counter, PAYLOADS)))
        assert isinstance(frame, BatchFrame)
        batch = frame.batch
        assert (frame.sequence, batch.base, batch.origin, batch.epoch) == (counter, counter, origin, 3)
        assert (batch.count, batch.ack_level, batch.namespace) == (5, AckLevel.LOGGED, "topic")
        assert frame.ack_wanted
        assert plain_is_sound(batch)
        assert payloads_of(batch) == PAYLOADS
        keys.update(batch.keys)
    assert 5 < len(keys) <= KEYS


def measured(rate: float, p50_us: float, lost: int = 0) -> Measured:
    return Measured(100, lost, 0, rate, rate, p50_us, p50_us, 1.0, 2.0, 3.0, {"repeated": 7.0})


def rounds(**figures: tuple[float, float]) -> Rounds:
    return {
        (scene, name.replace("_", "-")): {number: measured(*figure) for number in range(3)}
        for scene in (FLOW, FAN_OUT, IDLE)
        for name, figure in figures.items()
    }


def test_a_ratio_is_of_rounds_that_both_played() -> None:
    found = rounds(ours=(8.0, 3.0), jetstream=(2.0, 2.0))
    found[FLOW, "ours"][1] = measured(10.0, 3.0)
    del found[FLOW, "jetstream"][2]
    rate = ratios(found, Floor(FLOW, "ours", "jetstream", least=4.0))
    assert rate is not None
    assert (rate.median, rate.low, rate.high) == (4.5, 4.0, 5.0)
    late = ratios(found, Floor(IDLE, "ours", "jetstream", most=1.2))
    assert late is not None
    assert late.median == 1.5
    assert ratios(found, Floor(FLOW, "ours", "redis", least=3.0)) is None


def test_what_is_short_or_lost_is_told_and_is_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    running = {name: peers.PEERS[name]() for name in ("ours", "jetstream")}
    assert report(rounds(ours=(8.0, 2.0), jetstream=(2.0, 2.0)), running, None) == 0
    said = capsys.readouterr().out
    assert said.count("met") == 3
    assert "delta-prop raw: published 900, lost 0, repeated 63" in said
    assert report(rounds(ours=(7.9, 2.0), jetstream=(2.0, 2.0)), running, None) == 1
    assert "wanted >= 4: SHORT" in capsys.readouterr().out
    assert report(rounds(ours=(8.0, 2.5), jetstream=(2.0, 2.0)), running, None) == 1
    assert "wanted <= 1.2: SHORT" in capsys.readouterr().out
    lossy = rounds(ours=(8.0, 2.0))
    lossy[FLOW, "ours"][0] = measured(8.0, 2.0, lost=1)
    assert report(lossy, running, None) == 1
    assert "1 deltas were lost" in capsys.readouterr().out


def test_a_peer_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_peers_nats.JetStream, "program", "no-such-program")
    assert peers.main(["--peers", "jetstream", "--rounds", "1"]) == 0
    assert "JetStream raw is left out: no-such-program is not installed" in capsys.readouterr().err


def test_scenes_that_are_timed_know_it() -> None:
    assert [scene.timed for scene in peers.SCENES] == [False, False, False, True, True]
    assert Scene("s", 1, rate=1.0).timed
