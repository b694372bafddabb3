"""Errors that end a stream whose request continues elsewhere or may be repeated."""

from __future__ import annotations

from decant.router.request.token_stream import TokenStream
from decant.runtime.error_details import Reason
from decant.runtime.errors import RETRY_AFTER_SECONDS, Aborted, ServiceError, Unavailable


def interruption_error(stream: TokenStream, reason: Reason, message: str) -> ServiceError:
    if stream.num_tokens:
        return Aborted(reason, message, resume=stream.resume_point)
    return Unavailable(reason, message, retry_after=RETRY_AFTER_SECONDS)


def owner_changed_error(stream: TokenStream, *, by_client: bool) -> ServiceError:
    """Error for a changed owner; ``by_client`` if the client's own newer stream changed it."""
    if by_client:
        return Aborted(Reason.SUPERSEDED, "a newer stream of this request is open at another router")
    return interruption_error(stream, Reason.OWNER_CHANGED, "another router took over the request")


def workers_lost_error(stream: TokenStream, reason: Reason, message: str) -> ServiceError:
    return interruption_error(stream, Reason.WORKERS_LOST if stream.num_tokens else reason, message)
