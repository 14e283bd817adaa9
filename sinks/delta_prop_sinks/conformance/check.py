"""The function that runs all scenarios against a sink."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable

import anyio

from delta_prop_sinks.conformance import forgetting, forwarded, losses, rebuilding, story
from delta_prop_sinks.conformance.loop_watch import LoopWatch
from delta_prop_sinks.conformance.player import CheckSettings, Expected, Failing, Player, Probe
from delta_prop_sinks.conformance.steps import Leftovers
from delta_prop_sinks.sink import Sink
from delta_prop_wire.errors import UsageError


async def check_sink(
    make: Callable[[], Sink],
    probe: Probe | None = None,
    *,
    expected: Expected | None = None,
    failing: Failing | None = None,
    forgets: bool = False,
    pause_s: float = 0.02,
    deadline_s: float = 5.0,
) -> None:
    """Check that a sink follows the contract. Raises ContractViolation with the rule and the observation.

    Raises UsageError for invalid arguments.

    `make` creates a new sink, over the same file or service if it has one, which is empty the first time. It
    must not retain the sinks that it made: to simulate a crash, the kit drops its last reference to a sink.

    The kit compares the result of `get(namespace, vector_id)`, if the sink has that method, with the fold of
    the delivered rows; `forgets` allows it to return None, for a cache. `probe(sink)` returns the view of
    other readers: a value that can be compared, and that does not depend on how often a delta was delivered.
    `expected(rows)` returns the value that the probe must return after `rows` (`Applied`), each given once,
    in the order in which they were applied; if the probe returns states, fold the rows in the order of `key`.
    Once `forget` has removed a tombstone, the rows of its vector are left out.
    Without `expected`, the probe only shows if duplicates change anything. `expected` needs a `probe`, and so
    does a sink without `get`.

    `failing(n)` makes the sink's target fail from its n-th operation on, counted from 1; `failing(None)`
    repairs it. In any case, the thread port that the sink gets fails at times.

    `pause_s`: how long a slow caller pauses, so that `background` can work; `deadline_s`: how long a call may
    take. Nothing can end a call that waits for ever inside its own shield: run the check under
    `delta_prop.testing.run_virtual`, on asyncio or trio, and the check ends with Stuck.
    """
    _check_arguments(make, probe, expected, failing)
    for name, seconds in (("pause_s", pause_s), ("deadline_s", deadline_s)):
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
            raise UsageError(f"{name} {seconds!r:.80} is not a number of seconds above 0: give one")
    settings = CheckSettings(make, probe, expected, failing, forgets, pause_s, deadline_s)
    must_freeze = not gc.get_freeze_count()
    if must_freeze:  # older objects are not of the sinks, so the garbage collector need not search them
        gc.freeze()
    try:
        with LoopWatch().run() as watch:
            failure = await _run_story(settings, watch)
    finally:
        if must_freeze:
            gc.unfreeze()
    if failure is not None:
        raise failure


async def _run_story(settings: CheckSettings, watch: LoopWatch) -> Exception | None:
    """Run all scenarios; return the failure, to be raised outside the task group, which would wrap it."""
    before = Leftovers()
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        try:
            player = Player(settings, tasks, watch)
            _check_observable(player.sink, settings)
            await _play(player, before)
        except Exception as error:
            failure = error
        tasks.cancel_scope.cancel()
    return failure


def _check_observable(sink: Sink, settings: CheckSettings) -> None:
    if settings.probe is None and not hasattr(sink, "get"):
        raise UsageError(
            f"probe is missing, and a {type(sink).__name__} has no get() to compare: "
            "give a probe that returns the readers' view"
        )


def _check_arguments(make: object, probe: object, expected: object, failing: object) -> None:
    if not callable(make):
        raise UsageError(
            f"make {make!r:.80} cannot be called: give a function that creates the sink, such as its class"
        )
    for name, given in (("probe", probe), ("expected", expected), ("failing", failing)):
        if given is not None and not callable(given):
            raise UsageError(f"{name} {given!r:.80} cannot be called: give a function, or None")
    if expected is not None and probe is None:
        raise UsageError("expected: without a probe there is nothing to compare it with: give both")


async def _play(player: Player, before: Leftovers) -> None:
    player.check_name_and_statistics()
    await player.make_and_open()
    await story.check_order(player)
    await story.check_duplicates(player)
    await story.check_resume(player)
    await rebuilding.check_rebuilds(player)  # early, because it refolds the log several times
    await story.check_cancellation(player)
    await story.check_failures(player)
    await story.check_released_rows(player)
    await losses.check_sliced_batches(player)
    await losses.check_crashes(player)
    await forwarded.check_out_of_order_rows(player)
    await forwarded.check_rebuild_before_forwarded_rows(player)
    await forgetting.check_forgetting(player)
    await story.check_slow_calls(player)
    player.check_name_and_statistics()
    await story.check_closing(player, before)
