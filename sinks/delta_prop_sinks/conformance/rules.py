"""What the kit says: the rules of the contract, one sentence each, and the error that names one of them."""

from __future__ import annotations

from delta_prop_wire.errors import DeltaPropError

RULES = {
    "name": "a sink has a name that operators can use, and statistics() gives a snapshot that stays as it is",
    "blocking": "all calls run on the event loop, so what blocks goes to context.threads.run(function), and "
    "long work gives way now and then",
    "order": "apply() takes all rows that are meant, no others, in the order they come in",
    "repeats": "a row that is delivered again, alone or among others, has the effect of one",
    "resume": "open() tells the offset below which everything is in the sink, never a lower one than before, "
    "and the highest Lamport number in it; None: the service remembers what apply() has returned for",
    "committed": "committed(n) means that everything below n is durable, with a cursor of at least n",
    "failure": "apply() raises TryAgain, RejectDelta or StopSink, and what lies below the offset that it "
    "names is applied; a return means that all is applied",
    "cancellation": "a cancelled call has happened, or not, or in part; what is delivered again then comes "
    "out right, and a call that returns all the same is done",
    "open": "open() raises StopSink or UsageError; one that fails or is cancelled leaves nothing behind, "
    "since nobody closes it",
    "background": "background() runs until it is cancelled or has no more to do; its failures are "
    "reported by the next apply()",
    "backlog": "backlog() is a Backlog, at once, with 0 <= rows <= rows_max whatever is applied",
    "late": "rows out of the quarantine come late, behind higher offsets of other vectors, once; repeats are "
    "told by vector, no cursor moves, and a sink with its own makes them durable before apply() returns",
    "forwarded": "a forwarded row may sort before one of its vector that came earlier, or have its id; a "
    "sink that keeps states then folds the vector again, in canonical order, of equal ids the first",
    "close": "aclose() ends under a deadline of its own, lets go of everything, raises TryAgain at most, and "
    "may be called again",
    "deadline": "every call ends: waiting has a bound",
    "rebuild": "between begin_rebuild() and end_rebuild() a sink is void, however often it is opened; then "
    "it holds the states that it was given, no others, with its cursor where they end",
    "vectors": "head() and dimensions() tell of vectors as they are, or of none",
}
"""By the part that breaks it."""


class NotConforming(DeltaPropError):
    """The sink breaks the contract. `part` is a key of the rules, `seen` what happened."""

    def __init__(self, part: str, seen: str) -> None:
        super().__init__(f"{part}: {seen}. The contract: {RULES[part]}.")
        self.part = part
        self.seen = seen
