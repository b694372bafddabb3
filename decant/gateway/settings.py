from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from decant.client.channel import Tls
from decant.runtime.grpc_options import PORT
from decant.runtime.settings import SettingError
from decant.runtime.telemetry.logs import LogSettings

LONGEST_TIMEOUT_S = 1e6
"""Of ``--timeout``, and of the header of a request."""


class GatewaySettings(LogSettings):
    address: str = Field(
        default=f"127.0.0.1:{PORT}", min_length=1, description="host:port of routers, separated by commas"
    )
    ca: Path | None = Field(default=None, description="PEM roots of the routers' certificates; turns TLS to them on")
    certificate: Path | None = Field(default=None, description="PEM chain by which routers know this client")
    key: Path | None = Field(default=None, description="PEM key of the certificate")
    server_name: str | None = Field(
        default=None, min_length=1, description="name in the routers' certificates, if it is not their address"
    )
    host: str = Field(
        default="127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 or :: is every address"
    )
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    https_certificate: Path | None = Field(default=None, description="PEM chain of this server; turns HTTPS on")
    https_key: Path | None = Field(default=None, description="PEM key of the server's certificate")
    timeout: float | None = Field(
        default=None,
        gt=0,
        le=LONGEST_TIMEOUT_S,
        description="longest time of a request in seconds, which is its deadline; unset: no limit",
    )
    max_requests: int = Field(default=1024, ge=1, description="maximum requests at once; others are refused")
    max_body_bytes: int = Field(default=4 * 1024 * 1024, ge=1024, description="maximum size of a request's body")
    drain_seconds: float = Field(default=45.0, ge=0, description="seconds after SIGTERM for running requests to end")

    @model_validator(mode="after")
    def _complete_pairs(self) -> GatewaySettings:
        for certificate, key in (("certificate", "key"), ("https_certificate", "https_key")):
            for name, other in ((certificate, key), (key, certificate)):
                if getattr(self, name) is not None and getattr(self, other) is None:
                    raise SettingError(name, f"needs {other}", getattr(self, name))
        return self

    @property
    def tls(self) -> Tls | None:
        """How to verify routers; None: plaintext."""
        if self.ca is None and self.certificate is None and self.server_name is None:
            return None
        return Tls(self.ca, self.certificate, self.key, self.server_name)
