from __future__ import annotations

import os
import re
from dataclasses import replace

import grpc

from decant.client.channel import PROXY
from decant.runtime.error_details import Reason
from decant.runtime.errors import DeadlineExceeded, ServiceError, from_detail

_NO_CONNECTION = re.compile(
    r"(?:connections to all backends failing|failed to connect to all addresses); last error: "
    r"[A-Z_]+: (?:\S+:\S*: )?(.*)",
    re.DOTALL,
)
_CLOSED = "Socket closed"
"""Details of the status of a plaintext call, or one without client certificate, to a server with TLS."""
_NO_TLS = "WRONG_VERSION_NUMBER"
"""OpenSSL's text for bytes that are not TLS."""
_UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"
_OTHER_NAME = "Hostname Verification Check failed"


def is_lasting(error: ServiceError) -> bool:
    """Whether an error is of TLS settings that do not fit the router's: only other settings end it."""
    return error.reason is Reason.UNSPECIFIED and any(
        text in error.detail.message for text in (_NO_TLS, _UNTRUSTED, _OTHER_NAME)
    )


def with_advice(error: ServiceError, router: str, *, tls: bool, seconds: float | None) -> ServiceError:
    """Add a typed deadline, or advice on a failed connection, to errors of gRPC itself."""
    if error.reason is not Reason.UNSPECIFIED:
        return error
    if error.code is grpc.StatusCode.DEADLINE_EXCEEDED and seconds is not None:
        return DeadlineExceeded(f"the deadline of {seconds:g} s has passed")
    match = _NO_CONNECTION.match(error.detail.message)
    if error.code is not grpc.StatusCode.UNAVAILABLE or match is None:
        return error
    proxy = f" (through the proxy of {PROXY})" if os.environ.get(PROXY) else ""
    return from_detail(replace(error.detail, message=f"no connection to {router}{proxy}: {_why(match[1], tls)}"))


def _why(text: str, tls: bool) -> str:
    if _NO_TLS in text:
        return "it uses plaintext: leave out tls= (--ca)"
    if _UNTRUSTED in text:
        return "its certificate does not chain to the roots of tls= (--ca)"
    if _OTHER_NAME in text:
        return "its certificate has another name: give it as Tls(name=...) (--server-name)"
    if _CLOSED in text and tls:
        return "it closed the connection: it may ask for Tls(certificate=..., key=...) (--certificate, --key)"
    if _CLOSED in text:
        return "it closed the connection: it may speak TLS, which tls=Tls(ca=...) (--ca) turns on"
    return text
