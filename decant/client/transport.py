"""What gRPC itself says of a call that got no answer, in words that say what to do. No I/O."""

from __future__ import annotations

import re
from dataclasses import replace

import grpc

from decant.runtime.error_details import Reason
from decant.runtime.errors import DeadlineExceeded, ServiceError, from_fault

_NO_CONNECTION = re.compile(
    r"(?:connections to all backends failing|failed to connect to all addresses); last error: "
    r"[A-Z_]+: (?:\S+:\S*: )?(.*)",
    re.DOTALL,
)
_CLOSED = "Socket closed"
"""What a server with TLS does to a plaintext call, or to one without the certificate that it asks for."""
_NO_TLS = "WRONG_VERSION_NUMBER"
"""What OpenSSL says of bytes that are no TLS."""
_UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"
_OTHER_NAME = "Hostname Verification Check failed"


def clearer(error: ServiceError, router: str, *, tls: bool, seconds: float | None) -> ServiceError:
    """The error of a call to `router`: a deadline that passed at the client has the reason that the service gives it,
    and a connection that did not come about says why. Any other is returned as it is.

    `tls`: whether the client speaks TLS. `seconds`: the deadline of the call.
    """
    if error.reason is not Reason.UNSPECIFIED:
        return error
    if error.code is grpc.StatusCode.DEADLINE_EXCEEDED and seconds is not None:
        return DeadlineExceeded(f"the deadline of {seconds:g} s has passed")
    match = _NO_CONNECTION.match(error.fault.message)
    if error.code is not grpc.StatusCode.UNAVAILABLE or match is None:
        return error
    return from_fault(replace(error.fault, message=f"no connection to {router}: {_why(match[1], tls)}"))


def _why(text: str, tls: bool) -> str:
    if _NO_TLS in text:
        return "it speaks plaintext, and TLS is asked for: leave out tls= (--ca)"
    if _UNTRUSTED in text:
        return "its certificate does not chain to the roots of tls= (--ca)"
    if _OTHER_NAME in text:
        return "its certificate has another name: give it as Tls(name=...) (--server-name)"
    if _CLOSED in text and tls:
        return "it closed the connection: it may ask for Tls(certificate=..., key=...) (--certificate, --key)"
    if _CLOSED in text:
        return "it closed the connection: it may speak TLS, which tls=Tls(ca=...) (--ca) turns on"
    return text
