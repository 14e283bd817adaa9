"""Why a sink stands, in the words of a refusal: what happened, where, and what to do."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING

from delta_prop_sinks.sink import RejectDelta, TryAgain
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.route.quarantine import Quarantine


REJECT_IT = ": if others would pass, have the sink raise RejectDelta for it, which sets it aside"
"""What to do about a delta at which a sink fails on and on."""


def has_stopped(name: str, applied: int, why: str) -> Refused:
    """It stopped by itself, or by what it did."""
    return Refused(
        ErrorCode.PROCESSING_FAILED,
        f"sink {name!r} has stopped at offset {applied}: {why}",
        details={"sink": name, "applied": applied},
    )


def ahead(name: str, holds: int, end: int, *, rebuilds: bool) -> Refused:
    """It was shown what the log lost."""
    cure = (
        f"`rebuild({name!r})` or `delta-prop sinks rebuild {quote(name)} --data DIR` replaces what it holds"
    )
    if not rebuilds:
        cure = "it cannot be rebuilt: detach it, and give it data of its own, in a new place"
    return Refused(
        ErrorCode.CURSOR_TOO_OLD,
        f"sink {name!r} is ahead: it was shown deltas up to offset {holds}, and those from {end} on went "
        f"with a failure of the log's disk before they were synced: {cure}",
        details={"sink": name, "offset": holds, "next_offset": end},
    )


def lost_place(name: str, applied: int) -> Refused:
    """The log could not wait for it."""
    return Refused(
        ErrorCode.CURSOR_TOO_OLD,
        f"sink {name!r} needs a snapshot: the log was full and let go of offset {applied}, which it had not "
        'applied; detach it and attach it with start="earliest", or rebuild it',
        details={"sink": name, "applied": applied},
    )


def cannot_be_rebuilt(name: str, first_offset: int) -> Refused:
    """Why there is nothing to rebuild a sink from, and what to do."""
    return Refused(
        ErrorCode.CURSOR_TOO_OLD,
        f"sink {name!r} cannot be rebuilt: the log starts at offset {first_offset} and has no snapshot "
        "of what came before: let it compact (LogSettings(compact=True)), or attach the sink with "
        'start="earliest" to take what is left',
        details={"start_offset": first_offset},
    )


def is_detached(name: str) -> Refused:
    """It goes."""
    return Refused(ErrorCode.SHUTTING_DOWN, f"sink {name!r} is detached: attach it again")


def is_paused(name: str, applied: int) -> Refused:
    """An operator lets it rest."""
    return Refused(
        ErrorCode.PROCESSING_FAILED,
        f"sink {name!r} is paused at offset {applied}: resume it",
        details={"sink": name, "applied": applied},
    )


def is_stuck(apply_s_max: float) -> str:
    """The reason why nothing more is brought to a sink whose call does not end."""
    return (
        f"a call was broken off after {apply_s_max:g} s (apply_s_max), and does not end: what blocks in a "
        "thread goes on until it returns, so give it a time limit of its own"
    )


def is_full(quarantine: Quarantine, offset: int) -> str:
    """Why a sink stops whose quarantine has no room."""
    return (
        f"its quarantine is full ({len(quarantine)} of {quarantine.deltas_max} deltas, "
        f"{quarantine.bytes} of {quarantine.bytes_max} bytes), and offset {offset} belongs there "
        "too: replay or drop some"
    )


def rejected_another(failure: RejectDelta) -> str:
    """Why a sink stops that names a delta it was not given, so that none can be set aside."""
    return f"it rejected offset {failure.offset}, which it was not given: {failure.reason}"


def not_kept(error: OSError) -> TryAgain:
    """Why a sink waits while its quarantine cannot be written down."""
    return TryAgain(f"its quarantine could not be written down, so nothing may pass it yet: {error}")


def only(failure: Exception) -> Exception:
    """What a task group of the sink wrapped, where it is one failure."""
    while isinstance(failure, ExceptionGroup) and len(failure.exceptions) == 1:
        failure = failure.exceptions[0]
    return failure
