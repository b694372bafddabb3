"""Tenants, and authentication of calls by the SHA-256 digest of a bearer secret (docs/guides/tenants-and-tls.md)."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Protocol

import grpc
from google.protobuf.message import Message
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from decant.router.text.served_model import Models
from decant.runtime.error_details import Violation, shorten
from decant.runtime.errors import Unauthenticated
from decant.runtime.grpc_options import ACCEPTED
from decant.runtime.settings import InvalidSettings
from decant.runtime.settings_sources import read_toml
from decant.state.quota import TenantLimits

DEFAULT_TENANT = "default"

NO_LIMITS = TenantLimits()

Metadata = Iterable[tuple[str, str | bytes]]

_DIGEST = re.compile(r"[0-9a-f]{64}")
_PUBLIC_KEYS = frozenset({"models", "max_in_flight", "tokens_per_minute"})
"""Keys whose values an error may show; others may hold a secret by mistake."""


@dataclass(frozen=True)
class Tenant:
    name: str
    models: Models
    limits: TenantLimits = NO_LIMITS


@dataclass(slots=True)
class AuthenticatedCall:
    tenant: Tenant
    context: grpc.aio.ServicerContext[Any, Any]
    _has_headers: bool = False
    _sending: asyncio.Lock = field(default_factory=asyncio.Lock)  # a call takes one of headers and messages at a time

    @property
    def is_accepted(self) -> bool:
        """Whether the headers of an accepted request were sent."""
        return self._has_headers

    @property
    def is_sending(self) -> bool:
        """Whether headers or a message are on their way to the client, which may read them late."""
        return self._sending.locked()

    async def send_acceptance(self) -> None:
        """Send the headers of an accepted request, once. gRPC cancels the handler of a client that has left."""
        async with self._sending:
            if not self._has_headers:
                self._has_headers = True
                with suppress(grpc.aio.InternalError, grpc.aio.UsageError):
                    await self.context.send_initial_metadata(((ACCEPTED, "true"),))

    async def write(self, message: Message) -> None:
        """Write a message of a stream; several requests of one call may."""
        async with self._sending:
            await self.context.write(message)


class Authenticator(Protocol):
    limits: Mapping[str, TenantLimits]
    tenants: Sequence[str]

    def tenant_of(self, metadata: Metadata) -> Tenant:
        """Return the caller's tenant, or raise Unauthenticated."""


class NoAuthentication:
    def __init__(self, models: Models) -> None:
        self.limits: Mapping[str, TenantLimits] = {}
        self.tenants: Sequence[str] = (DEFAULT_TENANT,)
        self._tenant = Tenant(DEFAULT_TENANT, models)

    def tenant_of(self, metadata: Metadata) -> Tenant:
        return self._tenant


class Credentials:
    """Tenants by digest: the time of a lookup reveals nothing about the secret."""

    def __init__(self, tenants: Mapping[str, Tenant]) -> None:
        self.limits: Mapping[str, TenantLimits] = {
            tenant.name: tenant.limits for tenant in tenants.values() if tenant.limits != NO_LIMITS
        }
        self.tenants: Sequence[str] = tuple(dict.fromkeys(tenant.name for tenant in tenants.values()))
        self._tenants = dict(tenants)

    def tenant_of(self, metadata: Metadata) -> Tenant:
        values = [value for key, value in metadata if key == "authorization"]
        scheme, _, secret = str(values[0]).partition(" ") if len(values) == 1 else ("", "", "")
        tenant = self._tenants.get(hashlib.sha256(secret.encode()).hexdigest())
        if tenant is None or scheme.lower() != "bearer":
            raise Unauthenticated
        return tenant


class AuthenticatedService(Protocol):
    authenticator: Authenticator


def authenticated(method: Callable[[Any, Any, AuthenticatedCall], Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @wraps(method)
    async def authenticate(service: AuthenticatedService, request: Any, context: Any) -> Any:
        tenant = service.authenticator.tenant_of(context.invocation_metadata())
        return await method(service, request, AuthenticatedCall(tenant, context))

    return authenticate


def load(path: Path | None, models: Models) -> Authenticator:
    """Load the file of tenants, if any. Raises InvalidSettings."""
    if path is None:
        return NoAuthentication(models)
    try:
        file = _File.model_validate(read_toml(path))
    except ValidationError as error:
        raise InvalidSettings([_violation(path, detail) for detail in error.errors()]) from None
    if violations := [*_unknown_models(path, file, models), *_shared_digests(path, file)]:
        raise InvalidSettings(violations)
    return Credentials(
        {
            digest: tenant
            for name, entry in file.tenants.items()
            for tenant in [entry.tenant(name, models)]
            for digest in entry.tokens
        }
    )


def _digest(text: str) -> str:
    if not _DIGEST.fullmatch(text):
        raise ValueError("a SHA-256 digest: 64 hexadecimal digits in lower case")
    return text


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    tokens: list[Annotated[str, AfterValidator(_digest)]] = Field(min_length=1)
    models: list[str] | None = Field(default=None, min_length=1)
    max_in_flight: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)

    def tenant(self, name: str, models: Models) -> Tenant:
        allowed = models if self.models is None else models.subset(self.models)
        return Tenant(name, allowed, TenantLimits(self.max_in_flight, self.tokens_per_minute))


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    tenants: dict[Annotated[str, Field(min_length=1, max_length=128)], _Entry] = Field(min_length=1)


def _violation(path: Path, detail: ErrorDetails) -> Violation:
    keys = [str(key) for key in detail["loc"]]
    is_public = len(keys) > 2 and keys[2] in _PUBLIC_KEYS
    limit = detail["msg"].removeprefix("Input ").removeprefix("Value error, ")
    message = {"extra_forbidden": "no such key", "missing": "is needed"}.get(detail["type"], limit)
    return Violation(f"{path}: {'.'.join(keys)}", message, shorten(detail["input"]) if is_public else "")


def _unknown_models(path: Path, file: _File, models: Models) -> Iterator[Violation]:
    limit = f"ids of models that are served here: {', '.join(models.by_id)}"
    for name, entry in file.tenants.items():
        for id in entry.models or ():
            if id not in models.by_id:
                yield Violation(f"{path}: tenants.{name}.models", limit, shorten(id))


def _shared_digests(path: Path, file: _File) -> Iterator[Violation]:
    owners: dict[str, str] = {}
    for name, entry in file.tenants.items():
        for index, digest in enumerate(entry.tokens):
            if owners.setdefault(digest, name) != name:
                limit = f"a digest of one tenant only, and {owners[digest]} has it"
                yield Violation(f"{path}: tenants.{name}.tokens.{index}", limit, "")
