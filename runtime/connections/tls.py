from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import grpc
from pydantic import Field, model_validator

from decant.runtime.settings import SettingError, Settings
from decant.runtime.telemetry import logs

T = TypeVar("T")

_log = logs.get(__name__)


class ServerTls(Settings):
    tls_certificate: Path | None = Field(default=None, description="PEM chain of this server; unset: plaintext")
    tls_key: Path | None = Field(default=None, description="PEM key of tls_certificate")
    tls_client_ca: Path | None = Field(
        default=None, description="PEM roots of the certificates of clients; set: mutual TLS"
    )

    @property
    def tls(self) -> str:
        if self.tls_certificate is None:
            return "none"
        return "server" if self.tls_client_ca is None else "mutual"

    @model_validator(mode="after")
    def _check_server_tls(self) -> ServerTls:
        _pair("tls_certificate", self.tls_certificate, "tls_key", self.tls_key)
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise SettingError("tls_client_ca", "needs tls_certificate and tls_key", self.tls_client_ca)
        return self


class PeerTls(Settings):
    peer_ca: Path | None = Field(
        default=None, description="PEM roots of the certificates of other processes; unset: plaintext"
    )
    peer_certificate: Path | None = Field(default=None, description="PEM chain for mutual TLS with other processes")
    peer_key: Path | None = Field(default=None, description="PEM key of peer_certificate")
    peer_name: str | None = Field(
        default=None, description="name in the certificates of other processes, if it is not their address"
    )

    @model_validator(mode="after")
    def _check_peer_tls(self) -> PeerTls:
        _pair("peer_certificate", self.peer_certificate, "peer_key", self.peer_key)
        for name in ("peer_certificate", "peer_name"):
            if getattr(self, name) is not None and self.peer_ca is None:
                raise SettingError(name, "needs peer_ca", getattr(self, name))
        return self


class TlsFiles(Generic[T]):
    """TLS files that are reloaded when they change; thread-safe.

    The constructor raises SettingError of `load`; a reload keeps the last valid result.
    """

    def __init__(self, paths: Iterable[Path | None], load: Callable[[], T]) -> None:
        self.generation = 0
        """Increases with each reload."""
        self._paths = [path for path in paths if path is not None]
        self._load = load
        self._version = self._stat()
        self._lock = threading.Lock()
        self.loaded = load()

    def reload(self) -> T | None:
        with self._lock:
            version = self._stat()
            if version in (None, self._version):
                return None
            try:
                loaded = self._load()
            except SettingError as error:
                _log.warning("TLS files not reloaded", reason=str(error))
                return None
            if self._stat() != version:
                return None
            self._version, self.loaded = version, loaded
            self.generation += 1
            _log.info("TLS files reloaded")
            return loaded

    def _stat(self) -> list[tuple[int, int, int]] | None:
        try:
            stats = [path.stat() for path in self._paths]
        except OSError:
            return None
        return [(one.st_ino, one.st_size, one.st_mtime_ns) for one in stats]


def server_credentials(tls: ServerTls) -> grpc.ServerCredentials | None:
    """Make credentials that read changed files before a handshake; None for plaintext. Raises SettingError."""
    if tls.tls_certificate is None:
        return None
    files = TlsFiles((tls.tls_certificate, tls.tls_key, tls.tls_client_ca), partial(_server_configuration, tls))
    return grpc.dynamic_ssl_server_credentials(
        files.loaded,
        files.reload,  # type: ignore[arg-type]  # the stubs lack None, which means no change
        require_client_authentication=tls.tls_client_ca is not None,
    )


def check_peers(tls: PeerTls) -> None:
    """Check that two processes with these files authenticate each other. Raises SettingError."""
    for field in ("peer_ca", "peer_certificate", "peer_key"):
        if (path := getattr(tls, field)) is not None:
            _read(field, path)
    _channel_credentials(tls)
    if tls.peer_ca is None or tls.peer_certificate is None or tls.peer_key is None:
        return
    server, client = _peer_context(ssl.PROTOCOL_TLS_SERVER, tls), _peer_context(ssl.PROTOCOL_TLS_CLIENT, tls)
    client.check_hostname = tls.peer_name is not None
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=tls.peer_name),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    try:
        for end in ends * 2:  # hello; server's and client's certificates; their check
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        field, value = "peer_certificate", str(tls.peer_certificate)
        limit = f"a certificate that {tls.peer_ca} accepts ({error.verify_message.rstrip('.')})"
        raise SettingError(field, limit, value) from None


def _peer_context(protocol: int, tls: PeerTls) -> ssl.SSLContext:
    """Make a context as lenient as gRPC's."""
    assert tls.peer_certificate is not None
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_cert_chain(tls.peer_certificate, tls.peer_key, password="")
    context.load_verify_locations(tls.peer_ca)
    return context


def channel_files(tls: PeerTls) -> TlsFiles[grpc.ChannelCredentials | None]:
    return TlsFiles((tls.peer_ca, tls.peer_certificate, tls.peer_key), partial(_channel_credentials, tls))


def _server_configuration(tls: ServerTls) -> grpc.ServerCertificateConfiguration:
    assert tls.tls_certificate is not None
    assert tls.tls_key is not None
    _check_pair("tls_certificate", tls.tls_certificate, tls.tls_key)
    _check_roots("tls_client_ca", tls.tls_client_ca)
    pair = (_read("tls_key", tls.tls_key), _read("tls_certificate", tls.tls_certificate))
    clients = None if tls.tls_client_ca is None else _read("tls_client_ca", tls.tls_client_ca)
    return grpc.ssl_server_certificate_configuration([pair], clients)


def _channel_credentials(tls: PeerTls) -> grpc.ChannelCredentials | None:
    if tls.peer_ca is None:
        return None
    _check_roots("peer_ca", tls.peer_ca)
    if tls.peer_certificate is None or tls.peer_key is None:
        return grpc.ssl_channel_credentials(_read("peer_ca", tls.peer_ca))
    _check_pair("peer_certificate", tls.peer_certificate, tls.peer_key)
    return grpc.ssl_channel_credentials(
        _read("peer_ca", tls.peer_ca),
        _read("peer_key", tls.peer_key),
        _read("peer_certificate", tls.peer_certificate),
    )


def _pair(one: str, first: Path | None, other: str, second: Path | None) -> None:
    if (first is None) != (second is None):
        present, missing = (one, other) if second is None else (other, one)
        raise SettingError(present, f"needs {missing}", first or second)


def _check_pair(field: str, chain: Path, key: Path) -> None:
    """Check that chain and key belong together; gRPC would report a bad address."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain, key, password="")
    except OSError as error:  # ssl.SSLError too
        limit = f"a PEM certificate chain with the unencrypted key {key} ({error.strerror or error})"
        raise SettingError(field, limit, str(chain)) from None


def _check_roots(field: str, roots: Path | None) -> None:
    try:
        if roots is not None:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(roots)
    except OSError as error:
        raise SettingError(field, f"a file of PEM certificates ({error.strerror or error})", str(roots)) from None


def _read(field: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingError(field, f"a file that can be read ({error.strerror})", str(path)) from None
