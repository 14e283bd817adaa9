"""The answers of one connection: everything it sends besides deliveries and the outcomes of deltas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.server.permissions import Unauthorized
from delta_prop_wire.frames import Ack, Nack
from delta_prop_wire.message_rules import Phase
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    import anyio

    from delta_prop.server.connection_writer import ConnectionWriter
    from delta_prop.server.refusal_log import RefusalLog
    from delta_prop_wire.connection import Connection
    from delta_prop_wire.errors import ProtocolError, Refused
    from delta_prop_wire.frames import Frame, Request, Response


class Answers:
    """Sends answers and refusals to one client, and ends its connection.

    `scope`: the cancel scope of the connection.
    """

    def __init__(
        self,
        writer: ConnectionWriter,
        connection: Connection,
        refusals: RefusalLog,
        scope: anyio.CancelScope,
    ) -> None:
        self.writer = writer
        self.refusals = refusals
        self.scope = scope
        self._connection = connection

    @property
    def is_open(self) -> bool:
        """True between the first hello and the end of the connection."""
        return self._connection.phase is Phase.OPEN and not self.writer.is_ending

    def send(self, frame: Frame) -> None:
        """Send a frame; end the connection if the client leaves too many unread."""
        self.writer.send(frame)
        if self.writer.is_overfull:
            self.abort()

    def respond(self, request_number: int, response: Response, *, more: bool = False) -> None:
        """Answer the request of this number. `more`: True if another page follows."""
        self.send(Ack(0, correlation_id=request_number, response=response, more=more))

    def refuse(self, refused: Refused, *, correlation_id: int | None = None) -> None:
        """Send a refusal. `correlation_id`: the number of the refused request, if there is one."""
        self.refusals.record("REQUEST", refused)
        self.send(Nack.of(0, refused, correlation_id=correlation_id))
        if self._connection.phase is Phase.ENDED:  # the refused request was the first hello
            self.close()

    def refuse_request(self, request_number: int, request: Request, refused: Refused) -> None:
        """Refuse the request of this number."""
        if refused.code is ErrorCode.UNAUTHORIZED:  # the same text for every cause
            self.refuse_unauthorized(refused, type(request).__name__, correlation_id=request_number)
        else:
            self.refuse(refused, correlation_id=request_number)

    def refuse_unauthorized(
        self, refused: Refused, frame: str, sequence: int = 0, *, correlation_id: int | None = None
    ) -> None:
        """Refuse what the token does not allow, always with the same text, and end the connection.

        `sequence`: the number of the refused frame of deltas. `correlation_id`: that of the refused request.
        """
        if not isinstance(refused, Unauthorized):
            refused = Unauthorized(refused.message)
        self.refusals.record(frame, refused)
        self.close(Nack.of(sequence, refused, correlation_id=correlation_id))

    def refuse_bytes(self, error: ProtocolError) -> None:
        """Refuse invalid bytes, and end the connection."""
        self.refusals.record("FRAME", error)
        self.close(self._connection.nack_of(error))

    def close(self, nack: Nack | None = None) -> None:
        """Send `nack`, if given, as the last frame, and end."""
        if nack is not None and not self.writer.is_ending:
            self.send(nack)
        self.writer.is_ending = True
        self.writer.notify()

    def abort(self) -> None:
        """End the connection at once."""
        if not self.scope.cancel_called:  # a second cancel costs as much as the first
            self.scope.cancel()
