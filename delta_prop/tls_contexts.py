"""What a side of TLS 1.3 shows of itself and asks of the other one, read from PEM files.

No event loop: who waits for a connection brings its own way of waiting.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from delta_prop.ports import Tls


def server_context(tls: Tls) -> ssl.SSLContext:
    """What a server shows, and asks of its clients where `authorities` is given. Reads files.

    Raises UsageError.
    """
    if tls.certificate is None:
        raise UsageError("a server that speaks TLS shows a certificate: name its file, and its key's")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # nobody resumes a session
    if tls.authorities is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return _loaded(context, tls)


def client_context(tls: Tls) -> ssl.SSLContext:
    """What a client shows and whom it trusts. Reads files. Raises UsageError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if tls.authorities is None:
        context.load_default_certs()
    return _loaded(context, tls)


def _loaded(context: ssl.SSLContext, tls: Tls) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Set by Python before 3.11.4: an end that an attacker made would look like one that was announced.
    context.options &= ~getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)
    try:
        if tls.authorities is not None:
            context.load_verify_locations(tls.authorities)
        if tls.certificate is not None:
            context.load_cert_chain(tls.certificate, tls.key, _no_password)
    except OSError as error:  # ssl's own are such too
        files = " and ".join(
            str(one) for one in (tls.authorities, tls.certificate, tls.key) if one is not None
        )
        why = error.strerror or getattr(error, "reason", None) or error
        raise UsageError(f"TLS cannot use {files}: {why}; certificates and keys are PEM files") from error
    return context


def _no_password() -> str:
    raise UsageError("the key for TLS is encrypted, and nobody can be asked for its password: decrypt it")
