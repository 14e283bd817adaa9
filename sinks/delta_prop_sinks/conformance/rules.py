"""The rules of the contract, one sentence each, and the error that names one of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from delta_prop_wire.errors import DeltaPropError

RULES = {
    "name": "a sink has a name that operators can use, and statistics() returns a frozen snapshot",
    "blocking": "all calls run on the event loop, so blocking calls go to context.threads.run(function), and "
    "long work yields at intervals",
    "order": "apply() applies exactly the selected rows, in the order in which they come",
    "redelivery": "a redelivered row, alone or among others, takes effect once",
    "resume": "open() returns the offset below which all rows are in the sink, never a lower one than "
    "before, and the highest Lamport number in the sink; or it returns None, and the service stores the "
    "offset that apply() has reached",
    "committed": "committed(n) means that all rows below n are durable, with a cursor of at least n",
    "failure": "apply() raises TryAgain, RejectDelta or StopSink, and the rows below the offset that the "
    "error names are applied; if it returns, all rows are applied",
    "cancellation": "a cancelled call takes effect fully, partly or not at all; redelivered rows then give "
    "the right result, and a call that returns in spite of its cancellation has applied all rows",
    "open": "open() raises StopSink or UsageError; if it fails or is cancelled, it releases all resources, "
    "since aclose() does not follow",
    "background": "background() runs until it is cancelled or has no more to do; the next apply() "
    "reports its failures",
    "backlog": "backlog() returns a Backlog without a wait, and 0 <= rows <= rows_max always holds",
    "released": "a row released from quarantine arrives once, after rows of other vectors with higher "
    "offsets. So the sink detects duplicates per vector, and does not move its cursor for it; if the sink "
    "stores the cursor itself, it makes the row durable before apply() returns",
    "forwarded": "a forwarded row may sort before an earlier row of its vector, or have the same id; a sink "
    "that stores states then refolds the vector in canonical order, and of rows with one id uses the first",
    "close": "aclose() ends by its own deadline, releases all resources, raises nothing but TryAgain, and "
    "may be called twice",
    "deadline": "every call ends: each wait has a limit",
    "rebuild": "between begin_rebuild() and end_rebuild() a sink's data is invalid, however often it is "
    "opened; then it holds exactly the states that it was given, with its cursor at their offset",
    "tombstones": "forget() removes the tombstones that it is given, durably, and those whose last delta is "
    "below the offset, and nothing else; a repeated call changes nothing",
    "vectors": "head() and dimensions() return those of the present vectors, and nothing for a vector that "
    "the sink does not have",
}
"""The rules by part of the contract; a violation names the part."""


class ContractViolation(DeltaPropError):
    """The sink breaks the contract. `rule` is the name of a rule in RULES, `observed` what the sink did."""

    def __init__(self, rule: str, observed: str) -> None:
        super().__init__(f"{rule}: {observed}. The contract: {RULES[rule]}.")
        self.rule = rule
        self.observed = observed


@contextmanager
def allow_only(*allowed: type[Exception], rule: str, call: str) -> Iterator[None]:
    """Raise ContractViolation for any other exception than the allowed ones. `call`: what raises it."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (ContractViolation, *allowed)):
            raise
        raise ContractViolation(rule, f"{call} raised {error!r:.300}") from error
