"""One call that plays the whole story to a sink."""

from __future__ import annotations

import gc
import math
from typing import TYPE_CHECKING

import anyio

from delta_prop_sinks.conformance import forwarded, losses, rebuilding, story
from delta_prop_sinks.conformance.loop_watch import LoopWatch
from delta_prop_sinks.conformance.player import Player, Settings
from delta_prop_sinks.conformance.steps import Leftovers
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_sinks.conformance.player import Expected, Failing, Probe
    from delta_prop_sinks.sink import Sink


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
    """Raise NotConforming, whose message is the rule and what was seen, unless the sink keeps the contract.

    Raises UsageError where what it is given cannot be used.

    `make` gives the sink anew, over the same file or service where it has one, empty the first time. It must
    not keep the sinks that it made: a crash is a sink that nobody refers to any more.

    `get(namespace, vector_id)`, where the sink has it, is compared with the fold of what was delivered;
    `forgets` allows it None, for a cache. `probe(sink)` gives what other readers see, comparable, however
    often a delta was delivered. `expected(rows)` gives what the probe must see after these rows (`Applied`),
    each once, in the order they were applied in; where it sees states, these are folded in the order of
    `key`. Without `expected`, the probe only shows whether repeats change anything. It needs a `probe`, as
    does a sink without `get`.

    `failing(n)` makes the sink's target fail from its n-th operation on, 1 for the next; None mends it.
    With or without it the thread port that the sink is lent fails at times.

    `pause_s`: how long a slow caller pauses, for `background` to work in; `deadline_s`: how long a call may
    take. A call that waits for ever behind a shield of its own can be ended by nobody: run the check under
    `delta_prop.testing.run_virtual`, on asyncio or trio, and it ends with Stuck.
    """
    _check_given(make, probe, expected, failing)
    for name, seconds in (("pause_s", pause_s), ("deadline_s", deadline_s)):
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
            raise UsageError(f"{name} is {seconds!r:.80}: give a number of seconds above 0")
    settings = Settings(make, probe, expected, failing, forgets, pause_s, deadline_s)
    freezes = not gc.get_freeze_count()
    if freezes:  # what there was before is not the sinks' to let go of, and need not be looked through
        gc.freeze()
    try:
        with LoopWatch().running() as watch:
            failure = await _failure(settings, watch)
    finally:
        if freezes:
            gc.unfreeze()
    if failure is not None:
        raise failure


async def _failure(settings: Settings, watch: LoopWatch) -> Exception | None:
    """Play the story; return what ended it early, to be raised behind the task group, which would wrap it."""
    before = Leftovers()
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        try:
            player = Player(settings, tasks, watch)
            _check_seen(player.sink, settings)
            await _play(player, before)
        except Exception as error:
            failure = error
        tasks.cancel_scope.cancel()
    return failure


def _check_seen(sink: Sink, settings: Settings) -> None:
    if settings.probe is None and not hasattr(sink, "get"):
        raise UsageError(
            f"probe is missing, and a {type(sink).__name__} has no get(), so that nothing it holds would be "
            "compared: give a probe that gives what its readers see"
        )


def _check_given(make: object, probe: object, expected: object, failing: object) -> None:
    if not callable(make):
        raise UsageError(
            f"make is {make!r:.80}, which cannot be called: give what makes the sink anew, such as its class"
        )
    for name, given in (("probe", probe), ("expected", expected), ("failing", failing)):
        if given is not None and not callable(given):
            raise UsageError(f"{name} is {given!r:.80}, which cannot be called: give a function, or None")
    if expected is not None and probe is None:
        raise UsageError(
            "expected is what the probe must see, and without a probe it checks nothing: give both"
        )


async def _play(player: Player, before: Leftovers) -> None:
    player.check_outside()
    await player.make_and_open()
    await story.order(player)
    await story.repeats(player)
    await story.resume(player)
    await rebuilding.rebuild(player)  # while the log is short: it is folded again and again
    await story.cancellation(player)
    await story.failures(player)
    await story.late(player)
    await losses.parts(player)
    await losses.crash(player)
    await forwarded.late_rows(player)
    await forwarded.rebuilt_beneath(player)
    await story.slow(player)
    player.check_outside()
    await story.closing(player, before)
