"""Faults of a connection that last until somebody changes what it is configured with; each with its cure.

Pure: told apart by what the other side answered, or by the error of TLS.
"""

from __future__ import annotations

from delta_prop_wire.errors import UsageError
from delta_prop_wire.spec import MAGIC

FIRST_BYTES_MAX = 40
"""How much of an answer is looked at, and shown."""
TLS_ALERT = bytes((0x15, 3, 3, 0, 2, 2, 10))
"""A fatal alert (unexpected message), as a side that speaks TLS answers what is none."""

_TLS_TYPES = range(0x14, 0x18)
_HTTP = b"HTTP/"
_EXPIRED, _NOT_YET_VALID = 10, 9
_OTHER_NAMES = (62, 63, 64)
_NO_AUTHORITY = (2, 18, 19, 20, 21)
_PROTOCOL_PORT = "`serve` prints as port=…"
_HTTP_PORT = "`serve` prints as http=…"


class Misconfigured(UsageError):
    """A connection cannot work as it is configured: trying again changes nothing. The message has a cure."""


class Lasting:
    """Ends the tries of a client: once each of its addresses, one after the other, cannot work."""

    def __init__(self, addresses: int) -> None:
        self._left = self._addresses = addresses

    def note(self, cause: Exception) -> None:
        """Count why a connection ended. Raises it where no address is left that may work."""
        self._left = self._left - 1 if isinstance(cause, Misconfigured) else self._addresses
        if self._left <= 0:
            raise cause from None


def no_protocol(where: str, first: bytes, *, secured: bool) -> Misconfigured | None:
    """Report what a server's first bytes are where they are no frame; None where they may be one.

    `secured`: they came through TLS.
    """
    if first[0] == MAGIC:
        return None
    if _is_tls(first) and not secured:
        return speaks_tls(where)
    if _HTTP.startswith(first[: len(_HTTP)]):
        return Misconfigured(f"{where} is an HTTP port: name the one of the protocol, which {_PROTOCOL_PORT}")
    return Misconfigured(
        f"{where} is not a server of this protocol, its answer begins with {first[:FIRST_BYTES_MAX]!r}: name "
        f"the port that {_PROTOCOL_PORT}"
    )


def no_http(where: str, first: bytes, *, secured: bool) -> Misconfigured | None:
    """Report what a server's first bytes are where they are no answer of HTTP."""
    if _HTTP.startswith(first[: len(_HTTP)]):
        return None
    if _is_tls(first) and not secured:
        return speaks_tls(where)
    if first[0] == MAGIC:
        return Misconfigured(f"{where} speaks the protocol 0xD3: name the HTTP port, which {_HTTP_PORT}")
    return Misconfigured(
        f"{where} is not an HTTP port, its answer begins with {first[:FIRST_BYTES_MAX]!r}: name the one that "
        f"{_HTTP_PORT}"
    )


def speaks_tls(where: str) -> Misconfigured:
    """Report a server that wants TLS."""
    return Misconfigured(
        f"{where} speaks TLS: connect by TLS with tls=Tls(authorities=FILE), at the command line --tls-ca "
        "FILE (--tls where the system trusts its authority)"
    )


def speaks_no_tls(where: str, first: bytes = b"") -> Misconfigured:
    """Report a server that does not want TLS; `first`: of its answer, where that is known."""
    if first and _HTTP.startswith(first[: len(_HTTP)]):
        return Misconfigured(
            f"{where} does not speak TLS, but plain HTTP: connect without tls=, at the command line without "
            f"--tls…, where HTTP is meant; the port of the protocol is the one that {_PROTOCOL_PORT}"
        )
    return Misconfigured(
        f"{where} does not speak TLS: connect without tls=, at the command line without --tls…, or give the "
        "server a certificate (tls.certificate)"
    )


def of_tls(error: OSError, where: str, name: str, first: bytes) -> Misconfigured | None:
    """Report why TLS to a server cannot work; None where it may another time.

    `error`: an SSLError. `name`: what its certificate must bear. `first`: what it answered first, if that is
    known.
    """
    code: int | None = getattr(error, "verify_code", None)
    if code is not None:
        return _of_certificate(code, getattr(error, "verify_message", ""), where, name)
    reason: str = (getattr(error, "reason", None) or "").upper()
    if (first and not _is_tls(first)) or reason == "WRONG_VERSION_NUMBER":
        return speaks_no_tls(where, first)
    if reason.endswith(("ALERT_PROTOCOL_VERSION", "UNSUPPORTED_PROTOCOL")):
        return Misconfigured(f"{where} speaks no TLS 1.3 ({_words(reason)}): upgrade what listens there")
    if "CERTIFICATE_REQUIRED" in reason:
        return Misconfigured(
            f"{where} asks for a certificate of the client (certificate required): show one with "
            "Tls(certificate=FILE, key=FILE), at the command line --tls-certificate FILE --tls-key FILE"
        )
    if "ALERT" in reason and any(part in reason for part in ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED")):
        return Misconfigured(
            f"{where} does not accept the certificate of this client ({_words(reason)}): show one that has "
            "not expired and that an authority of the server's tls.authorities signed"
        )
    return None


def _of_certificate(code: int, why: str, where: str, name: str) -> Misconfigured:
    if code == _EXPIRED:
        return Misconfigured(
            f"{where} shows a certificate that is out of date ({why}): renew the server's certificate, or "
            "correct the clock of this machine"
        )
    if code == _NOT_YET_VALID:
        return Misconfigured(
            f"{where} shows a certificate of the future ({why}): correct the clock of this machine, or make "
            "the server's certificate anew"
        )
    if code in _OTHER_NAMES:
        return Misconfigured(
            f"{where} shows a certificate for other names ({why}): connect by a name that it bears, or say "
            f"which in place of {name!r:.80}: Tls(server_name=NAME), at the command line --tls-name NAME"
        )
    if code in _NO_AUTHORITY:
        return Misconfigured(
            f"{where} shows a certificate of an authority that is not trusted here ({why}): name the file of "
            "the authority that signed it, Tls(authorities=FILE), at the command line --tls-ca FILE"
        )
    return Misconfigured(f"{where} shows a certificate that cannot be trusted ({why}): make it anew")


def _words(reason: str) -> str:
    return reason.replace("_", " ").lower()


def _is_tls(first: bytes) -> bool:
    return first[0] in _TLS_TYPES and first[1:2] in (b"", b"\x03")
