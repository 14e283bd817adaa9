"""TLS 1.3 contexts of a server and a client, from PEM files.

No event loop: each caller waits for connections in its own way.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from delta_prop.platform.ports import Tls


def server_context(tls: Tls) -> ssl.SSLContext:
    """Return a server's context, which requires client certificates if `authorities` is given. Reads files.

    Raises UsageError.
    """
    if tls.certificate is None:
        raise UsageError("tls without a certificate: give a TLS server the files of its certificate and key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # session resumption is not used
    if tls.authorities is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return _load_files(context, tls)


def client_context(tls: Tls) -> ssl.SSLContext:
    """Return a client's context, with certificate and authorities. Reads files. Raises UsageError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if tls.authorities is None:
        context.load_default_certs()
    return _load_files(context, tls)


def _load_files(context: ssl.SSLContext, tls: Tls) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Python before 3.11.4 sets this option; with it, a connection that an attacker cuts off looks as if the
    # peer had closed it.
    context.options &= ~getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)
    try:
        if tls.authorities is not None:
            context.load_verify_locations(tls.authorities)
        if tls.certificate is not None:
            context.load_cert_chain(tls.certificate, tls.key, _reject_password)
    except OSError as error:  # SSLError is an OSError too
        files = " and ".join(
            str(file) for file in (tls.authorities, tls.certificate, tls.key) if file is not None
        )
        why = error.strerror or getattr(error, "reason", None) or error
        raise UsageError(f"TLS cannot use {files}: {why}: give certificates and keys as PEM files") from error
    return context


def _reject_password() -> str:
    raise UsageError("the TLS key is encrypted, and a service cannot ask for its password: decrypt it")
