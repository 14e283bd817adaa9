"""`Answers`: refusals are counted and audited, and end the connection where they must."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from delta_prop.server.answers import Answers
from delta_prop.server.permissions import Unauthorized
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import Ack, Get, Nack, Welcome
from delta_prop_wire.message_rules import UNAUTHORIZED_TEXT, Phase
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop_wire.frames import Frame

BAD = Refused(ErrorCode.BAD_REQUEST, "wrong")


class AnswersFixture:
    def __init__(self, phase: Phase = Phase.OPEN) -> None:
        self.sent: list[Frame] = []
        self.recorded: list[tuple[str, ErrorCode]] = []
        self.aborts = 0
        self.writer: Any = SimpleNamespace(
            send=self.sent.append, is_overfull=False, is_ending=False, notify=lambda: None
        )
        connection: Any = SimpleNamespace(phase=phase)
        refusals: Any = SimpleNamespace(record=self._record, narrow=lambda refused: refused)
        scope: Any = SimpleNamespace(cancel_called=False, cancel=self._cancel)
        self.scope = scope
        self.answers = Answers(self.writer, connection, refusals, scope)

    def _record(self, frame: str, refusal: Refused) -> None:
        self.recorded.append((frame, refusal.code))

    def _cancel(self) -> None:
        self.aborts += 1
        self.scope.cancel_called = True


def test_refused_request_leaves_the_connection_open() -> None:
    fixture = AnswersFixture()
    fixture.answers.refuse_request(7, Get("v"), BAD)
    assert fixture.sent == [Nack.of(0, BAD, correlation_id=7)]
    assert fixture.recorded == [("REQUEST", ErrorCode.BAD_REQUEST)]
    assert fixture.answers.is_open


def test_refused_first_hello_ends_the_connection() -> None:
    fixture = AnswersFixture(Phase.ENDED)
    fixture.answers.refuse(BAD, correlation_id=1)
    assert len(fixture.sent) == 1
    assert fixture.writer.is_ending


@pytest.mark.parametrize(
    "refused", [Unauthorized("namespace 'x'"), Refused(ErrorCode.UNAUTHORIZED, "job of another token")]
)
def test_unauthorized_request_gets_one_text_and_ends_the_connection(refused: Refused) -> None:
    fixture = AnswersFixture()
    fixture.answers.refuse_request(7, Get("v"), refused)
    (nack,) = fixture.sent
    assert isinstance(nack, Nack)
    assert (nack.text, nack.correlation_id) == (UNAUTHORIZED_TEXT, 7)
    assert fixture.recorded == [("Get", ErrorCode.UNAUTHORIZED)]
    assert not fixture.answers.is_open


def test_nothing_follows_the_last_nack() -> None:
    fixture = AnswersFixture()
    for _ in range(2):
        fixture.answers.close(Nack.of(0, BAD))
    assert len(fixture.sent) == 1


def test_client_that_leaves_answers_unread_is_aborted_once() -> None:
    fixture = AnswersFixture()
    fixture.answers.respond(3, Welcome())
    assert fixture.sent == [Ack(0, correlation_id=3, response=Welcome())]
    fixture.writer.is_overfull = True
    for _ in range(2):
        fixture.answers.respond(3, Welcome())
    assert fixture.aborts == 1
