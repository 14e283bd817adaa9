"""Synthetic histories of a service, a client or a sink, some of them with a violation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delta_prop_simulations.chaos.histories import SUM, TOKEN, Ack, ClientHistory, LogHistory, LostTail
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import AckLevel, Delta, Dot, Source, create, sparse_add
from delta_prop_wire.encode import encode_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop_wire.spec import ErrorCode

A, B = 16, 32
"""Two origins."""

DURABLE, LOGGED, MEMORY = AckLevel.DURABLE, AckLevel.LOGGED, AckLevel.MEMORY


def delta_of(token: str, key: str = "v", namespace: str = "docs", **fields: Any) -> Delta:
    """Return a delta that is identified by its token."""
    return Delta(key, create([1.0, 2.0]), namespace, metadata={TOKEN: token}, **fields)


def batch(
    base: int,
    *deltas: Delta,
    origin: int = A,
    clock: Sequence[Dot] = (),
    source: Source = Source.LOCAL,
    lamport: int | None = None,
) -> tuple[Any, Source, int | None]:
    """Return a batch with its source and Lamport number, as `log_of` takes it."""
    return encode_batch(deltas, origin=origin, base=base, clock=clock), source, lamport


def log_of(*batches: Any, node: str = "n", lost: Any = (), survives: AckLevel = DURABLE) -> LogHistory:
    """Return a log that holds these batches in order, and that has lost the batches `lost` after these."""
    log = LogHistory(node, b"l" * 16, DURABLE, DURABLE)
    log.batches = _assign_offsets(batches, 0, 1)
    if lost:
        log.lost_tails.append(LostTail(_assign_offsets(lost, log.next_offset, 50), survives))
    return log


def _assign_offsets(batches: Any, offset: int, lamport: int) -> list[LoggedBatch]:
    logged = []
    for body, source, given_lamport in batches:
        number = lamport if given_lamport is None else given_lamport
        logged.append(LoggedBatch(body, offset, number, source))
        offset += body.count
        lamport = max(lamport, number + body.count)
    return logged


def acknowledged_client(
    *acks: tuple[AckLevel, int | None, bool], token: str = "t1", requested_level: AckLevel | None = None
) -> ClientHistory:
    """Return the history of a client that sent one delta and got these acknowledgements."""
    history = ClientHistory()
    history.note_sent(token, "n", "w", ("docs", "v"), requested_level)
    for level, offset, duplicate in acks:
        history.note_acknowledged(token, Ack(level, offset, duplicate))
    return history


def refused_client(code: ErrorCode, token: str = "t1", *, after_unknown: bool = False) -> ClientHistory:
    """Return the history of a client whose delta was refused. `after_unknown`: after an unknown outcome."""
    history = acknowledged_client(token=token)
    if after_unknown:
        history.note_unknown(token)
    history.note_refused(token, code)
    return history


def summing_client(acknowledged: int, unknown: int) -> ClientHistory:
    """Return the history of a writer of sums, with the given numbers of acknowledged and unknown outcomes."""
    history = ClientHistory()
    for number in range(1 + acknowledged + unknown):
        token = f"{SUM}w" if number == 0 else f"{SUM}w-{number}"
        history.note_sent(token, "n", "w", ("docs", f"{SUM}w"), None)
        if number <= acknowledged:
            history.note_acknowledged(token, Ack(DURABLE, number, duplicate=False))
        else:
            history.note_unknown(token)
    return history


def log_of_sums(count: int) -> LogHistory:
    """Return a log in which 1 was added `count` times."""
    key = f"{SUM}w"
    added = [Delta(key, sparse_add([0], [1.0]), "docs") for _ in range(count)]
    return log_of(batch(1, Delta(key, create([0.0, 0.0]), "docs"), *added))
