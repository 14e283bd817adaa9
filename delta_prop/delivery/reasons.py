"""Reasons why a sink is stopped, as refusals: the event, the offset, and the fix."""

from __future__ import annotations

from shlex import quote

from delta_prop.delivery.quarantine import Quarantine
from delta_prop_sinks.sink import RejectDelta, TryAgain
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

REJECT_FIX = ": if other deltas would be applied, raise RejectDelta for this one, which quarantines it"
"""Fix for a delta at which a sink always fails."""


def sink_stopped(name: str, applied: int, why: str) -> Refused:
    """Return the refusal of a sink that stopped by itself, or because of a failure."""
    return Refused(
        ErrorCode.PROCESSING_FAILED,
        f"sink {name!r} has stopped at offset {applied}: {why}",
        details={"sink": name, "applied": applied},
    )


def sink_ahead(name: str, sink_end: int, end: int, *, can_rebuild: bool) -> Refused:
    """Return the refusal of a sink with deltas, up to `sink_end`, that the log, up to `end`, has lost."""
    fix = f"`rebuild({name!r})` or `delta-prop sinks rebuild {quote(name)} --data DIR` replaces its contents"
    if not can_rebuild:
        fix = "it cannot be rebuilt: detach it, and attach it with new storage of its own"
    return Refused(
        ErrorCode.CURSOR_TOO_OLD,
        f"sink {name!r} is ahead: it has deltas up to offset {sink_end}, but those from {end} on were lost "
        f"by a failure of the log's disk before they were synced: {fix}",
        details={"sink": name, "offset": sink_end, "next_offset": end},
    )


def cursor_invalidated(name: str, applied: int) -> Refused:
    """Return the refusal of a sink for which the log could not wait."""
    return Refused(
        ErrorCode.CURSOR_TOO_OLD,
        f"sink {name!r} needs a snapshot: the log was full and dropped offset {applied}, which it had not "
        'applied: detach it and attach it with start="earliest", or rebuild it',
        details={"sink": name, "applied": applied},
    )


def cannot_be_rebuilt(name: str, first_offset: int) -> Refused:
    """Return the refusal of a rebuild without a snapshot or a complete log."""
    return Refused(
        ErrorCode.CURSOR_TOO_OLD,
        f"sink {name!r} cannot be rebuilt: the log starts at offset {first_offset} and has no snapshot "
        "of the rows before it: let it compact (LogSettings(compact=True)), or attach the sink with "
        'start="earliest" to get the rows that are left',
        details={"start_offset": first_offset},
    )


def sink_detached(name: str) -> Refused:
    """Return the refusal of a sink that is being detached."""
    return Refused(ErrorCode.SHUTTING_DOWN, f"sink {name!r} is detached: attach it again")


def sink_paused(name: str, applied: int) -> Refused:
    """Return the refusal of a sink that an operator has paused."""
    return Refused(
        ErrorCode.PROCESSING_FAILED,
        f"sink {name!r} is paused at offset {applied}: resume it",
        details={"sink": name, "applied": applied},
    )


def call_stuck(apply_timeout_s: float) -> str:
    """Return why no more deltas are delivered to a sink whose cancelled call does not end."""
    return (
        f"a call was cancelled after {apply_timeout_s:g} s (apply_timeout_s), but does not end: code that "
        "blocks in a thread runs until it returns: give it a time limit of its own"
    )


def quarantine_full(quarantine: Quarantine, offset: int) -> str:
    """Return why a sink stops whose quarantine is full."""
    return (
        f"its quarantine is full ({len(quarantine)} of {quarantine.deltas_max} deltas, "
        f"{quarantine.bytes} of {quarantine.bytes_max} bytes), but offset {offset} belongs there "
        "too: replay or drop some deltas"
    )


def rejected_unknown(failure: RejectDelta) -> str:
    """Return why a sink stops that rejected a delta which it did not get: no delta can be quarantined."""
    return f"it rejected offset {failure.offset}, which it was not given: {failure.reason}"


def quarantine_not_written(error: OSError) -> TryAgain:
    """Return the failure of a sink that waits while its quarantine cannot be written."""
    return TryAgain(f"its quarantine cannot be written, so no delta may pass it yet: {error}")


def unwrap_failure(failure: Exception) -> Exception:
    """Return the failure inside the sink's exception groups, if it is a single one."""
    while isinstance(failure, ExceptionGroup) and len(failure.exceptions) == 1:
        failure = failure.exceptions[0]
    return failure
