"""Sinks that break the contract of `forget`, and the expected complaints of the kit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sinks.correct_sinks import Forgetting, Plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop_wire.algebra import VectorState

    Ref = tuple[str, str]


class ForgetsInMemoryOnly(Forgetting):
    async def forget(self, erased: Sequence[Ref], before: int) -> None:
        for ref, state in list(self.states.items()):
            if self.must_go(ref, state, erased, before):
                del self.states[ref]


class ForgetsLiveVectors(Forgetting):
    def must_go(self, ref: Ref, state: VectorState, erased: Sequence[Ref], before: int) -> bool:
        return ref in erased or super().must_go(ref, state, erased, before)


class IgnoresTheOffset(Forgetting):
    def must_go(self, ref: Ref, state: VectorState, erased: Sequence[Ref], before: int) -> bool:
        return super().must_go(ref, state, erased, 0)


class RemovesEveryTombstone(Forgetting):
    def must_go(self, ref: Ref, state: VectorState, erased: Sequence[Ref], before: int) -> bool:
        return not state.alive


class KeepsErasedTombstones(Forgetting):
    def must_go(self, ref: Ref, state: VectorState, erased: Sequence[Ref], before: int) -> bool:
        return super().must_go(ref, state, (), before)


class FailsForUnknownVectors(Forgetting):
    async def forget(self, erased: Sequence[Ref], before: int) -> None:
        for ref in erased:
            self.states[ref]
        await super().forget(erased, before)


class ForgetsWithAForeignError(Forgetting):
    async def forget(self, erased: Sequence[Ref], before: int) -> None:
        await self.context.threads.run(lambda: None)
        await super().forget(erased, before)


WRONG: tuple[tuple[type[Plain], str, str], ...] = (
    (
        ForgetsInMemoryOnly,
        "tombstones",
        "after forget() and a crash, get('default', 'plain-erased') returned",
    ),
    (ForgetsLiveVectors, "tombstones", "after forget(), get('default', 'plain-returned') returned None, and"),
    (IgnoresTheOffset, "tombstones", "after forget() get('default', 'plain-expired') returned"),
    (RemovesEveryTombstone, "tombstones", "'plain-remaining', not deleted below "),
    (KeepsErasedTombstones, "tombstones", "after forget() get('default', 'plain-erased') returned"),
    (FailsForUnknownVectors, "tombstones", "forget() raised KeyError("),
    (ForgetsWithAForeignError, "tombstones", "raised OSError("),
)
"""Each wrong sink, the rule that it breaks, and a part of the expected complaint."""
