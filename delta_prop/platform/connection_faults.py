"""Faults of a connection that last until its configuration is changed; each message has its fix.

Pure: a fault is recognised by the first bytes of the other side's answer, or by the TLS error.
"""

from __future__ import annotations

from delta_prop_wire.errors import UsageError
from delta_prop_wire.spec import MAGIC

FIRST_BYTES_MAX = 40
"""Maximum bytes of an answer that are examined and printed."""
TLS_ALERT = bytes((0x15, 3, 3, 0, 2, 2, 10))
"""Fatal alert (unexpected_message), the answer of a TLS server to bytes that are not TLS."""

_TLS_TYPES = range(0x14, 0x18)
_HTTP = b"HTTP/"
# Codes of OpenSSL for a certificate that it could not verify.
_EXPIRED, _NOT_YET_VALID = 10, 9
_OTHER_NAMES = (62, 63, 64)
_NO_AUTHORITY = (2, 18, 19, 20, 21)
_PROTOCOL_PORT = "`serve` prints as port=…"
_HTTP_PORT = "`serve` prints as http=…"


class Misconfigured(UsageError):
    """A connection that cannot work as it is configured: a retry changes nothing. The message has the fix."""


class AddressFaults:
    """Ends a client's retries once each of its addresses, one after the other, is misconfigured."""

    def __init__(self, address_count: int) -> None:
        self._left_count = self._address_count = address_count

    def note(self, cause: Exception) -> None:
        """Count the cause of a closed connection. Raises the cause if no address is left that may work."""
        self._left_count = self._left_count - 1 if isinstance(cause, Misconfigured) else self._address_count
        if self._left_count <= 0:
            raise cause from None


def protocol_fault(where: str, first: bytes, *, secured: bool) -> Misconfigured | None:
    """Return the fault of a server whose first bytes are not a frame; None if they may be one.

    `secured`: True if they came through TLS.
    """
    if first[0] == MAGIC:
        return None
    if _is_tls(first) and not secured:
        return tls_required_fault(where)
    if _HTTP.startswith(first[: len(_HTTP)]):
        return Misconfigured(f"{where} is an HTTP port: name the one of the protocol, which {_PROTOCOL_PORT}")
    return Misconfigured(
        f"{where} is not a server of this protocol; its answer begins with {first[:FIRST_BYTES_MAX]!r}: name "
        f"the port that {_PROTOCOL_PORT}"
    )


def http_fault(where: str, first: bytes, *, secured: bool) -> Misconfigured | None:
    """Return the fault of a server whose first bytes are not an HTTP answer; None if they are."""
    if _HTTP.startswith(first[: len(_HTTP)]):
        return None
    if _is_tls(first) and not secured:
        return tls_required_fault(where)
    if first[0] == MAGIC:
        return Misconfigured(f"{where} speaks the protocol 0xD3: name the HTTP port, which {_HTTP_PORT}")
    return Misconfigured(
        f"{where} is not an HTTP port; its answer begins with {first[:FIRST_BYTES_MAX]!r}: name the one that "
        f"{_HTTP_PORT}"
    )


def tls_required_fault(where: str) -> Misconfigured:
    """Return the fault of a server that requires TLS."""
    return Misconfigured(
        f"{where} speaks TLS: connect by TLS with tls=Tls(authorities=FILE), at the command line --tls-ca "
        "FILE (--tls where the system trusts its authority)"
    )


def tls_unsupported_fault(where: str, first: bytes = b"") -> Misconfigured:
    """Return the fault of a server that does not speak TLS; `first`: its answer's first bytes, if known."""
    if first and _HTTP.startswith(first[: len(_HTTP)]):
        return Misconfigured(
            f"{where} does not speak TLS, but plain HTTP: to use HTTP, connect without tls= (at the command "
            f"line without --tls…); to use the protocol of delta-prop, name the port that {_PROTOCOL_PORT}"
        )
    return Misconfigured(
        f"{where} does not speak TLS: connect without tls=, at the command line without --tls…, or give the "
        "server a certificate (tls.certificate)"
    )


def tls_fault(error: OSError, where: str, name: str, first: bytes) -> Misconfigured | None:
    """Return the fault for which TLS to a server cannot work; None if a retry may succeed.

    `error`: an SSLError. `name`: the name that the server's certificate must bear. `first`: the first bytes
    of the server's answer, if known.
    """
    code: int | None = getattr(error, "verify_code", None)
    if code is not None:
        return _certificate_fault(code, getattr(error, "verify_message", ""), where, name)
    reason: str = (getattr(error, "reason", None) or "").upper()
    if (first and not _is_tls(first)) or reason == "WRONG_VERSION_NUMBER":
        return tls_unsupported_fault(where, first)
    if reason.endswith(("ALERT_PROTOCOL_VERSION", "UNSUPPORTED_PROTOCOL")):
        return Misconfigured(
            f"{where} does not speak TLS 1.3 ({_format_reason(reason)}): upgrade that server"
        )
    if "CERTIFICATE_REQUIRED" in reason:
        return Misconfigured(
            f"{where} asks for a certificate of the client (certificate required): show one with "
            "Tls(certificate=FILE, key=FILE), at the command line --tls-certificate FILE --tls-key FILE"
        )
    if "ALERT" in reason and any(part in reason for part in ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED")):
        return Misconfigured(
            f"{where} does not accept the certificate of this client ({_format_reason(reason)}): show one "
            "that has not expired and that an authority of the server's tls.authorities signed"
        )
    return None


def _certificate_fault(code: int, why: str, where: str, name: str) -> Misconfigured:
    if code == _EXPIRED:
        return Misconfigured(
            f"{where} shows a certificate that is out of date ({why}): renew the server's certificate, or "
            "correct the clock of this machine"
        )
    if code == _NOT_YET_VALID:
        return Misconfigured(
            f"{where} shows a certificate that is not valid yet ({why}): correct this machine's clock, or "
            "reissue the server's certificate"
        )
    if code in _OTHER_NAMES:
        return Misconfigured(
            f"{where} shows a certificate for other names ({why}): connect by a name that it bears, or give "
            f"one in place of {name!r:.80}: Tls(server_name=NAME), at the command line --tls-name NAME"
        )
    if code in _NO_AUTHORITY:
        return Misconfigured(
            f"{where} shows a certificate of an authority that is not trusted here ({why}): name the file of "
            "the authority that signed it, Tls(authorities=FILE), at the command line --tls-ca FILE"
        )
    return Misconfigured(f"{where} shows a certificate that cannot be trusted ({why}): reissue it")


def _format_reason(reason: str) -> str:
    return reason.replace("_", " ").lower()


def _is_tls(first: bytes) -> bool:
    return first[0] in _TLS_TYPES and first[1:2] in (b"", b"\x03")
