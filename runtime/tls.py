"""TLS for both ends of a connection, from files that settings name."""

from __future__ import annotations

from pathlib import Path

import grpc
from pydantic import Field, model_validator

from runtime.settings import Refused, Settings


class ServerTls(Settings):
    """How a server proves itself, and whether its clients have to."""

    tls_certificate: Path | None = Field(
        default=None, description="PEM chain of this server; without one it speaks plaintext"
    )
    tls_key: Path | None = Field(default=None, description="PEM key of tls_certificate")
    tls_client_ca: Path | None = Field(
        default=None, description="PEM roots that every client's certificate must chain to (mutual TLS)"
    )

    @property
    def tls(self) -> str:
        """Which kind, for the log."""
        if self.tls_certificate is None:
            return "none"
        return "server" if self.tls_client_ca is None else "mutual"

    @model_validator(mode="after")
    def _whole_server_tls(self) -> ServerTls:
        _pair("tls_certificate", self.tls_certificate, "tls_key", self.tls_key)
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise Refused("tls_client_ca", "needs tls_certificate and tls_key", self.tls_client_ca)
        return self


class PeerTls(Settings):
    """How this process reaches others of the same deployment."""

    peer_ca: Path | None = Field(
        default=None, description="PEM roots of the other processes; without any it speaks plaintext"
    )
    peer_certificate: Path | None = Field(default=None, description="PEM chain shown to other processes (mutual TLS)")
    peer_key: Path | None = Field(default=None, description="PEM key of peer_certificate")
    peer_name: str | None = Field(
        default=None, description="name expected in the others' certificates, where they are reached by address"
    )

    @model_validator(mode="after")
    def _whole_peer_tls(self) -> PeerTls:
        _pair("peer_certificate", self.peer_certificate, "peer_key", self.peer_key)
        for name in ("peer_certificate", "peer_name"):
            if getattr(self, name) is not None and self.peer_ca is None:
                raise Refused(name, "needs peer_ca", getattr(self, name))
        return self


def server_credentials(tls: ServerTls) -> grpc.ServerCredentials | None:
    """None for plaintext. Raises Refused for a file that can't be read."""
    if tls.tls_certificate is None or tls.tls_key is None:
        return None
    chain = _read("tls_certificate", tls.tls_certificate)
    key = _read("tls_key", tls.tls_key)
    clients = _read("tls_client_ca", tls.tls_client_ca) if tls.tls_client_ca else None
    return grpc.ssl_server_credentials([(key, chain)], clients, require_client_auth=clients is not None)


def channel_credentials(tls: PeerTls) -> grpc.ChannelCredentials | None:
    """None for plaintext. Raises Refused for a file that can't be read."""
    if tls.peer_ca is None:
        return None
    if tls.peer_certificate is None or tls.peer_key is None:
        return grpc.ssl_channel_credentials(_read("peer_ca", tls.peer_ca))
    return grpc.ssl_channel_credentials(
        _read("peer_ca", tls.peer_ca),
        _read("peer_key", tls.peer_key),
        _read("peer_certificate", tls.peer_certificate),
    )


def _pair(one: str, first: Path | None, other: str, second: Path | None) -> None:
    if (first is None) != (second is None):
        given, missing = (one, other) if second is None else (other, one)
        raise Refused(given, f"needs {missing}", first or second)


def _read(field: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Refused(field, f"a file that can be read ({error.strerror})", path) from None
