"""`Access`: the permissions of a token, and the effect of a changed token file on connections."""

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
from tests.delta_prop.server.tokens import TokenFile, table, world_with_clock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

READER = table("reader", "t-read", subscribe=True, namespaces='["docs"]')
WRITER = table("writer", "t-write", publish=True, namespaces='["docs"]')
SECOND_US = 1_000_000


def refusal(access: Access, token: str | None) -> Unauthorized:
    with pytest.raises(Unauthorized) as caught:
        access.check(token)
    return caught.value


def run_with_access(
    main: Callable[[Access, TokenFile], Awaitable[None]], text: str = READER + WRITER
) -> None:
    """Run `main` while an access polls its token file."""

    async def run() -> None:
        file = TokenFile(text)
        access = Access(virtual_world(), file)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(access.run)
            await main(access, file)
            tasks.cancel_scope.cancel()

    run_virtual(run)


def test_access_without_token_file_allows_everything() -> None:
    async def main() -> None:
        access = Access(virtual_world())
        assert access.is_open
        assert access.check(None) is access.check("whatever") is ALL_PERMISSIONS
        assert access.is_valid(ALL_PERMISSIONS)
        await access.reload()
        await access.run()  # there is no file to watch

    run_virtual(main)


def test_wrong_tokens_get_identical_refusals() -> None:
    async def main() -> None:
        world, clock = world_with_clock()
        old = table("old", "t-old", admin=True, expires="1970-01-01T00:00:10Z")
        access = Access(world, TokenFile(READER + old))
        clock.wall_time_us = 10 * SECOND_US - 1
        assert access.check("t-old").name == "old"
        assert access.check("t-read").can_read("docs")
        assert not access.is_open
        clock.wall_time_us = 10 * SECOND_US
        wrong_tokens = (
            None,
            "",
            "t-rea",
            "t-read ",
            "T-READ",
            "t-old",
            "t" * TOKEN_CHARS_MAX,
            "t" * 2000,
            "\ud800",
        )
        refusals = [refusal(access, token) for token in wrong_tokens]
        assert {
            (refused.code, refused.message, refused.retry_after_ms, refused.field, refused.row)
            for refused in refusals
        } == {(refusals[0].code, UNAUTHORIZED_TEXT, None, None, None)}
        assert all(refused.details == {} for refused in refusals)
        causes = [refused.cause for refused in refusals]
        assert causes[0] == causes[1] == "no token was given"
        assert causes[5] == "token 'old' has expired"
        assert causes[6] == "the token is unknown"
        assert "give up to 1024" in causes[7]
        assert not any("t-" in cause for cause in causes)

    run_virtual(main)


def test_unusable_token_file_fails_startup() -> None:
    async def main() -> None:
        for text, message in (
            (b"\xff", "not UTF-8"),
            ("[[token]]", "name"),
            (b"#" * (1024 * 1024 + 1), "larger"),
        ):
            file = TokenFile("")
            file.content = text
            with pytest.raises(UsageError, match=message):
                Access(virtual_world(), file)

    run_virtual(main)


def test_token_without_rate_gets_server_default() -> None:
    async def main() -> None:
        permissions = Access(virtual_world(), TokenFile(WRITER), TokenDefaults(rate=7.0, burst=3)).check(
            "t-write"
        )
        assert (permissions.rate, permissions.burst) == (7.0, 3)

    run_virtual(main)


def test_removed_token_is_invalid_within_seconds() -> None:
    async def main(access: Access, file: TokenFile) -> None:
        changed: list[float] = []
        access.on_change = lambda: changed.append(anyio.current_time())
        reader, writer = access.check("t-read"), access.check("t-write")
        file.content = WRITER
        await anyio.sleep(1.5)
        assert changed == [1.0]
        assert not access.is_valid(reader)
        assert access.is_valid(writer)
        assert access.check("t-write") is writer
        refusal(access, "t-read")
        await anyio.sleep(10)
        assert changed == [1.0]

    run_with_access(main)


def test_changed_token_invalidates_earlier_permissions() -> None:
    async def main(access: Access, file: TokenFile) -> None:
        reader, writer = access.check("t-read"), access.check("t-write")
        file.content = READER.replace("docs", "other") + table(
            "writer", "t-new", publish=True, namespaces='["docs"]'
        )
        await access.reload()
        assert not access.is_valid(reader)
        assert not access.is_valid(writer), "its secret has changed, although its permissions have not"
        assert access.check("t-read").can_read("other")
        assert access.check("t-new") == writer
        refusal(access, "t-write")

    run_with_access(main)


def test_added_token_invalidates_no_other() -> None:
    async def main(access: Access, file: TokenFile) -> None:
        access.on_change = lambda: pytest.fail("on_change was called although no checked token has changed")
        refusal(access, "t-write")
        file.content = WRITER + READER
        await anyio.sleep(1.5)
        assert access.check("t-write").publish

    run_with_access(main, READER)


def test_token_is_invalid_once_expired() -> None:
    async def run() -> None:
        world, clock = world_with_clock()
        access = Access(
            world, TokenFile(READER + table("b", "t-b", admin=True, expires="1970-01-01T00:01:00Z"))
        )
        changed: list[float] = []
        access.on_change = lambda: changed.append(anyio.current_time())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(access.run)
            permissions = access.check("t-b")
            await anyio.sleep(2.5)
            assert access.is_valid(permissions)
            clock.wall_time_us = 60 * SECOND_US
            assert not access.is_valid(permissions)
            assert not changed
            await anyio.sleep(5)
            assert changed == [3.0]
            tasks.cancel_scope.cancel()

    run_virtual(run)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("[[token", "not TOML"),
        ("", "0 tables"),
        (READER.replace("subscribe", "subscibe"), "did you mean subscribe?"),
        (FileNotFoundError(2, "No such file", "tokens.toml"), "tokens.toml"),
    ],
)
def test_broken_token_file_keeps_tokens_and_logs_once(
    broken: str | Exception, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(access: Access, file: TokenFile) -> None:
        access.on_change = lambda: pytest.fail("on_change was called although the file is invalid")
        permissions = access.check("t-read")
        file.content = broken
        await anyio.sleep(10.5)
        assert access.check("t-read") is permissions
        assert access.is_valid(permissions)
        assert file.reads >= 10
        file.content = READER + WRITER
        await anyio.sleep(1)
        file.content = broken
        await anyio.sleep(1)

    with caplog.at_level(logging.ERROR, "delta_prop"):
        run_with_access(main)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2, "each period of an invalid file should be logged once"
    assert all(message in logged and "stay valid" in logged for logged in messages)
