"""Who asks, and how much he may: tenants, found by the digest of the secret that a call brings.

    authorization: Bearer SECRET --SHA-256--> digest --the file's tenants--> Tenant --> Call
                                                 '-- nobody's: Unauthenticated

The file is TOML, read once, and the same for every router of a deployment:

    [tenants.acme]
    tokens = ["64 hexadecimal digits"]    digests, never the secrets
    models = ["tiny-python"]              those that it may use; unset: all
    max_in_flight = 8                     requests at work, over all routers, Tokenize too; unset: no limit
    tokens_per_minute = 100000            of prompts and answers; unset: no limit

Without a file everybody is one tenant, who may do everything.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Protocol

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from decant.router.text.served_model import Models
from decant.runtime.error_details import Violation, shorten
from decant.runtime.errors import Unauthenticated
from decant.runtime.settings import InvalidSettings
from decant.runtime.settings_sources import read_toml
from decant.state.quota import TenantLimits

EVERYBODY = "default"
"""The tenant of all requests, where callers bring no credentials."""

NO_LIMITS = TenantLimits()

Metadata = Iterable[tuple[str, str | bytes]]

_DIGEST = re.compile(r"[0-9a-f]{64}")
_SHOWN = frozenset({"models", "max_in_flight", "tokens_per_minute"})
"""Keys whose values an error may repeat; others may hold a secret, put there by mistake."""


@dataclass(frozen=True)
class Tenant:
    """Whose calls these are. `models` are those that it may use."""

    name: str
    models: Models
    limits: TenantLimits = NO_LIMITS


@dataclass(frozen=True, slots=True)
class AuthenticatedCall:
    """A call of somebody who is known."""

    tenant: Tenant
    context: grpc.aio.ServicerContext[Any, Any]


class Authenticator(Protocol):
    """Who may call."""

    limits: Mapping[str, TenantLimits]
    """By name, of tenants that have any."""

    def tenant_of(self, metadata: Metadata) -> Tenant:
        """Raises Unauthenticated."""


class NoAuthentication:
    """No credentials are asked for."""

    def __init__(self, models: Models) -> None:
        self.limits: Mapping[str, TenantLimits] = {}
        self._tenant = Tenant(EVERYBODY, models)

    def tenant_of(self, metadata: Metadata) -> Tenant:
        return self._tenant


class Credentials:
    """`tenants` by the digests of their secrets. Looking a digest up tells by its time nothing about the secret."""

    def __init__(self, tenants: Mapping[str, Tenant]) -> None:
        self.limits: Mapping[str, TenantLimits] = {
            tenant.name: tenant.limits for tenant in tenants.values() if tenant.limits != NO_LIMITS
        }
        self._tenants = dict(tenants)

    def tenant_of(self, metadata: Metadata) -> Tenant:
        given = [value for key, value in metadata if key == "authorization"]
        scheme, _, secret = str(given[0]).partition(" ") if len(given) == 1 else ("", "", "")
        tenant = self._tenants.get(hashlib.sha256(secret.encode()).hexdigest())
        if tenant is None or scheme.lower() != "bearer":
            raise Unauthenticated
        return tenant


def for_callers(service: object, descriptor: ServiceDescriptor, callers: Authenticator) -> Any:
    """What gRPC calls in the place of `service`: its methods, which learn who calls them before they begin."""

    async def known(handle: Callable[[Any, AuthenticatedCall], Awaitable[Any]], request: Any, context: Any) -> Any:
        return await handle(request, AuthenticatedCall(callers.tenant_of(context.invocation_metadata()), context))

    names = [method.name for method in descriptor.methods]
    return SimpleNamespace(**{name: partial(known, getattr(service, name)) for name in names})


def load(path: Path | None, models: Models) -> Authenticator:
    """Raises InvalidSettings for a file that can't be honoured."""
    if path is None:
        return NoAuthentication(models)
    try:
        file = _File.model_validate(read_toml(path))
    except ValidationError as error:
        raise InvalidSettings([_violation(path, detail) for detail in error.errors()]) from None
    if wrong := [*_unknown_models(path, file, models), *_shared_digests(path, file)]:
        raise InvalidSettings(wrong)
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
    """A tenant as the file has it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    tokens: list[Annotated[str, AfterValidator(_digest)]] = Field(min_length=1)
    models: list[str] | None = Field(default=None, min_length=1)
    max_in_flight: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)

    def tenant(self, name: str, models: Models) -> Tenant:
        may_use = models if self.models is None else models.only(self.models)
        return Tenant(name, may_use, TenantLimits(self.max_in_flight, self.tokens_per_minute))


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    tenants: dict[Annotated[str, Field(min_length=1, max_length=128)], _Entry] = Field(min_length=1)


def _violation(path: Path, detail: ErrorDetails) -> Violation:
    keys = [str(key) for key in detail["loc"]]
    shown = len(keys) > 2 and keys[2] in _SHOWN
    limit = detail["msg"].removeprefix("Input ").removeprefix("Value error, ")
    named = {"extra_forbidden": "no such key", "missing": "is needed"}.get(detail["type"], limit)
    return Violation(f"{path}: {'.'.join(keys)}", named, shorten(detail["input"]) if shown else "")


def _unknown_models(path: Path, file: _File, models: Models) -> Iterator[Violation]:
    limit = f"ids of models that are served here: {', '.join(models.by_id)}"
    for name, entry in file.tenants.items():
        for id in entry.models or ():
            if id not in models.by_id:
                yield Violation(f"{path}: tenants.{name}.models", limit, shorten(id))


def _shared_digests(path: Path, file: _File) -> Iterator[Violation]:
    owners: dict[str, str] = {}
    for name, entry in file.tenants.items():
        for place, digest in enumerate(entry.tokens):
            if owners.setdefault(digest, name) != name:
                limit = f"a digest of one tenant only, and {owners[digest]} has it"
                yield Violation(f"{path}: tenants.{name}.tokens.{place}", limit, "")
