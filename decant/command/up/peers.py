"""Mutual TLS of a deployment, with certificates made for this run.

    DECANT_PEER_CA, _CERTIFICATE, _KEY, _NAME     shown to workers, by routers, workers and `decant audit`
    DECANT_TLS_CERTIFICATE, _KEY, _CLIENT_CA      a worker's server; those of a router are for its clients
    DECANT_ADMIN_NAME                             among the clients of routers; all processes here administer workers

DECANT_PEER_* of the environment replace them, for workers shared by several deployments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from decant.command.errors import CommandFailed
from decant.runtime.connections.tls import PeerTls, ServerTls
from decant.runtime.settings import variable_name

OF_PEERS = frozenset(variable_name(name) for name in PeerTls.model_fields)
OF_SERVERS = frozenset(variable_name(name) for name in (*ServerTls.model_fields, "admin_name"))
_NEEDED = tuple(variable_name(f"peer_{name}") for name in ("ca", "certificate", "key"))


@dataclass(frozen=True)
class PeerCredentials:
    """Paths of PEM files; `name` is that in the certificate, None if it is the address."""

    ca: str
    certificate: str
    key: str
    name: str | None = None

    def of_router(self) -> dict[str, str]:
        return {variable_name(f"peer_{name}"): value for name, value in asdict(self).items() if value is not None}

    def of_worker(self) -> dict[str, str]:
        served = {"tls_certificate": self.certificate, "tls_key": self.key, "tls_client_ca": self.ca}
        return self.of_router() | {variable_name(name): value for name, value in served.items()}


def make(folder: Path) -> PeerCredentials:
    try:
        from decant.runtime.connections import certificates
    except ModuleNotFoundError as error:
        text = f"{error.name}: not installed, and needed for the certificates of the processes"
        raise CommandFailed(f"{text}: pip install 'decant-llm[router]'", status=2) from None
    files = certificates.make(folder)
    return PeerCredentials(str(files.ca), str(files.certificate), str(files.key), certificates.PEER_NAME)


def from_environment(environment: Mapping[str, str]) -> PeerCredentials | None:
    variables = OF_PEERS & environment.keys()
    if not variables:
        return None
    missing = [name for name in _NEEDED if name not in environment]
    if missing:
        raise CommandFailed(f"{', '.join(sorted(variables))}: needs {', '.join(missing)}", status=2)
    ca, certificate, key = (environment[name] for name in _NEEDED)
    return PeerCredentials(ca, certificate, key, environment.get(variable_name("peer_name")))
