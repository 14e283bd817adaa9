"""Options of verbs that connect; `publish` retries refused lines; `subscribe` ends at the end of the log."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from delta_prop.calls.outcomes import PublishAck
from delta_prop.calls.receipt import Receipt
from delta_prop.commands.connect_options import ConnectOptions, connect_options_of
from delta_prop.commands.parsers import add_server_arguments
from delta_prop.commands.publishers import LineAck, RemotePublisher
from delta_prop.commands.subscribe import _write_from_server
from delta_prop.platform import system
from delta_prop.platform.ports import Tls
from delta_prop.testing import run_virtual
from delta_prop_wire.delta import AckLevel, Delta, Dot, create
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode


def parse_connect_options(*arguments: str) -> ConnectOptions:
    parser = ArgumentParser()
    add_server_arguments(parser, "--to", "a server")
    return connect_options_of(parser.parse_args(["--to", "h:1", *arguments]))


@pytest.mark.parametrize(
    ("arguments", "tls"),
    [
        ([], None),
        (["--tls"], Tls()),
        (["--tls-ca", "a"], Tls(authorities="a")),
        (["--tls-name", "n"], Tls(server_name="n")),
        (["--tls-certificate", "c", "--tls-key", "k"], Tls("c", "k")),
    ],
)
def test_any_tls_option_enables_tls(arguments: list[str], tls: Tls | None) -> None:
    assert parse_connect_options(*arguments).tls == tls
    assert parse_connect_options("--to", "h:2", *arguments).addresses == ("h:1", "h:2")


def test_line_is_retried_on_queue_full_and_fails_on_fenced() -> None:
    refusals = [Refused(ErrorCode.QUEUE_FULL, "full")] * 3
    outcomes: list[LineAck | Refused] = []

    class Producer:
        def offer_numbered(self, counter: int, delta: Delta, then: Any) -> None:
            if refusals:
                raise refusals.pop()
            receipt = Receipt()
            receipt.acknowledge(PublishAck(17, Dot(1, counter), 1, AckLevel.DURABLE))
            then(receipt)

    async def main() -> None:
        sender = RemotePublisher(cast("Any", Producer()))
        await sender.send(1, Delta("v", create([1.0])), outcomes.append)
        refusals.append(Refused(ErrorCode.FENCED, "another one"))
        with pytest.raises(Refused, match="FENCED"):
            await sender.send(2, Delta("v", create([1.0])), outcomes.append)

    run_virtual(main)
    assert outcomes == [LineAck(17, False)]


def test_subscribe_without_follow_ends_at_the_initial_log_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(system, "put", lines.append)
    delta, acked = Delta("v", create([1.0])), list[int]()
    batches = [[(3, 1, delta), (4, 2, delta)], [(5, 3, delta), (6, 4, delta)]]

    async def next_batch() -> Any:
        if not batches:
            await anyio.sleep_forever()
        return batches.pop(0)

    subscriber = SimpleNamespace(
        log_end=6, received=7, next_batch=next_batch, ack=acked.append, standing_by=False
    )
    run_virtual(
        lambda: _write_from_server(cast("Any", subscriber), Namespace(count=None, group=None, follow=False))
    )
    assert (acked, len(lines), batches) == ([3, 4, 5], 3, [])
