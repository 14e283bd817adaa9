"""Token files for tests: a token as TOML, a file with changeable content, a world with a settable clock."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from delta_prop.server.tokens import digest_of
from delta_prop.testing import virtual_world

if TYPE_CHECKING:
    from delta_prop.platform.ports import World


def table(name: str, token: str, **more: Any) -> str:
    """Return one token as TOML."""
    lines = ["[[token]]", f'name = "{name}"', f'sha256 = "{digest_of(token).hex()}"']
    for key, value in more.items():
        toml = str(value).lower() if isinstance(value, bool) else value
        lines.append(f"{key} = {toml}")
    return "\n".join(lines) + "\n"


class TokenFile:
    """A token file for `Access`; reading it raises `content` if that is an exception."""

    def __init__(self, text: str) -> None:
        self.content: str | bytes | Exception = text
        self.reads = 0

    def __call__(self) -> bytes:
        self.reads += 1
        if isinstance(self.content, Exception):
            raise self.content
        return self.content if isinstance(self.content, bytes) else self.content.encode()


class SettableClock:
    """The running loop's time, and a wall clock that a test sets."""

    def __init__(self, world: World) -> None:
        self.now = world.clock.now
        self.wall_time_us = 0

    def wall_us(self) -> int:
        return self.wall_time_us


def world_with_clock() -> tuple[World, SettableClock]:
    world = virtual_world()
    clock = SettableClock(world)
    return replace(world, clock=clock), clock
