"""Access: what a token gets, and what a file that changes does to those who are connected."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop.server.access import Access
from delta_prop.server.permissions import ALL_PERMISSIONS, Unauthorized
from delta_prop.server.tokens import TOKEN_CHARS_MAX, TokenDefaults
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_wire.errors import UsageError
from delta_prop_wire.message_rules import UNAUTHORIZED_TEXT
from tests.delta_prop.server.tokens import File, table, world_with_clock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

READS = table("reader", "t-read", subscribe=True, namespaces='["docs"]')
WRITES = table("writer", "t-write", publish=True, namespaces='["docs"]')
SECOND = 1_000_000


def refusal(access: Access, token: str | None) -> Unauthorized:
    with pytest.raises(Unauthorized) as caught:
        access.check(token)
    return caught.value


def running(main: Callable[[Access, File], Awaitable[None]], text: str = READS + WRITES) -> None:
    """Run `main` beside an access that looks at its file."""

    async def run() -> None:
        file = File(text)
        access = Access(virtual_world(), file)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(access.run)
            await main(access, file)
            tasks.cancel_scope.cancel()

    run_virtual(run)


def test_without_a_file_everybody_may_do_everything() -> None:
    async def main() -> None:
        access = Access(virtual_world())
        assert access.is_open
        assert access.check(None) is access.check("whatever") is ALL_PERMISSIONS
        assert access.is_valid(ALL_PERMISSIONS)
        await access.reload()
        await access.run()  # there is nothing to look at

    run_virtual(main)


def test_every_wrong_token_is_refused_the_same_way() -> None:
    async def main() -> None:
        world, clock = world_with_clock()
        old = table("old", "t-old", admin=True, expires="1970-01-01T00:00:10Z")
        access = Access(world, File(READS + old))
        clock.wall = 10 * SECOND - 1
        assert access.check("t-old").name == "old"
        assert access.check("t-read").can_read("docs")
        assert not access.is_open
        clock.wall = 10 * SECOND
        wrong = (None, "", "t-rea", "t-read ", "T-READ", "t-old", "t" * TOKEN_CHARS_MAX, "t" * 2000, "\ud800")
        refusals = [refusal(access, token) for token in wrong]
        assert {(one.code, one.message, one.retry_after_ms, one.field, one.row) for one in refusals} == {
            (refusals[0].code, UNAUTHORIZED_TEXT, None, None, None)
        }
        assert all(one.details == {} for one in refusals)
        causes = [one.cause for one in refusals]
        assert causes[0] == causes[1] == "no token was given"
        assert causes[5] == "token 'old' has expired"
        assert causes[6] == "the token is unknown"
        assert "give up to 1024" in causes[7]
        assert not any("t-" in cause for cause in causes)

    run_virtual(main)


def test_a_file_that_cannot_be_used_at_the_start_is_refused() -> None:
    async def main() -> None:
        for text, said in (
            (b"\xff", "not UTF-8"),
            ("[[token]]", "name"),
            (b"#" * (1024 * 1024 + 1), "larger"),
        ):
            file = File("")
            file.holds = text
            with pytest.raises(UsageError, match=said):
                Access(virtual_world(), file)

    run_virtual(main)


def test_the_usual_rate_is_the_servers() -> None:
    async def main() -> None:
        grant = Access(virtual_world(), File(WRITES), TokenDefaults(rate=7.0, burst=3)).check("t-write")
        assert (grant.rate, grant.burst) == (7.0, 3)

    run_virtual(main)


def test_a_token_that_is_taken_out_ends_within_seconds() -> None:
    async def main(access: Access, file: File) -> None:
        changed: list[float] = []
        access.on_change = lambda: changed.append(anyio.current_time())
        reader, writer = access.check("t-read"), access.check("t-write")
        file.holds = WRITES
        await anyio.sleep(1.5)
        assert changed == [1.0]
        assert not access.is_valid(reader)
        assert access.is_valid(writer)
        assert access.check("t-write") is writer
        refusal(access, "t-read")
        await anyio.sleep(10)
        assert changed == [1.0]

    running(main)


def test_a_token_that_says_something_else_now_must_come_again() -> None:
    async def main(access: Access, file: File) -> None:
        reader, writer = access.check("t-read"), access.check("t-write")
        file.holds = READS.replace("docs", "other") + table(
            "writer", "t-new", publish=True, namespaces='["docs"]'
        )
        await access.reload()
        assert not access.is_valid(reader)
        assert not access.is_valid(writer), "its secret is another, though its rights are the same"
        assert access.check("t-read").can_read("other")
        assert access.check("t-new") == writer
        refusal(access, "t-write")

    running(main)


def test_a_token_that_is_added_ends_nobody() -> None:
    async def main(access: Access, file: File) -> None:
        access.on_change = lambda: pytest.fail("nobody's token has changed")
        refusal(access, "t-write")
        file.holds = WRITES + READS
        await anyio.sleep(1.5)
        assert access.check("t-write").publish

    running(main, READS)


def test_a_token_ends_when_it_expires() -> None:
    async def run() -> None:
        world, clock = world_with_clock()
        access = Access(world, File(READS + table("b", "t-b", admin=True, expires="1970-01-01T00:01:00Z")))
        changed: list[float] = []
        access.on_change = lambda: changed.append(anyio.current_time())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(access.run)
            grant = access.check("t-b")
            await anyio.sleep(2.5)
            assert access.is_valid(grant)
            clock.wall = 60 * SECOND
            assert not access.is_valid(grant)
            assert not changed
            await anyio.sleep(5)
            assert changed == [3.0]
            tasks.cancel_scope.cancel()

    run_virtual(run)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("[[token", "not TOML"),
        ("", "0 tables"),
        (READS.replace("subscribe", "subscibe"), "did you mean subscribe?"),
        (FileNotFoundError(2, "No such file", "tokens.toml"), "tokens.toml"),
    ],
)
def test_a_broken_file_changes_nothing_and_is_told_once(
    broken: str | Exception, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(access: Access, file: File) -> None:
        access.on_change = lambda: pytest.fail("the tokens read before hold on")
        grant = access.check("t-read")
        file.holds = broken
        await anyio.sleep(10.5)
        assert access.check("t-read") is grant
        assert access.is_valid(grant)
        assert file.reads >= 10
        file.holds = READS + WRITES
        await anyio.sleep(1)
        file.holds = broken
        await anyio.sleep(1)

    with caplog.at_level(logging.ERROR, "delta_prop"):
        running(main)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2, "once, and once more after the file was well in between"
    assert all(said in one and "stay valid" in one for one in told)
