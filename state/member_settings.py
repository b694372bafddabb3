from __future__ import annotations

from pydantic import Field, field_validator

from decant.runtime.connections.tls import PeerTls
from decant.runtime.serving.server_settings import ServerSettings
from decant.runtime.settings import SettingError
from decant.runtime.telemetry.logs import LogSettings
from decant.state.urls import BadUrl, check_url


class MemberSettings(LogSettings, ServerSettings, PeerTls):
    """Settings of a process in the directory of a deployment."""

    id: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        description="name among the processes of the deployment; unset: generated",
    )
    redis_url: str = Field(
        default="redis://127.0.0.1:6379",
        description="Redis of the deployment: redis://, rediss:// (TLS), unix://, redis+sentinel:// or redis+cluster://",
    )
    advertise: str | None = Field(
        default=None, description="host:port at which others reach this process; unset: host and port"
    )

    @field_validator("redis_url")
    @classmethod
    def _redis_url(cls, url: str) -> str:
        try:
            check_url(url)
        except BadUrl as error:
            raise SettingError("redis_url", error.limit, error.value) from None
        return url

    @field_validator("advertise")
    @classmethod
    def _advertise(cls, address: str | None) -> str | None:
        if address is not None and not address.rpartition(":")[2].isdecimal():
            raise SettingError("advertise", "host:port", address)
        return address
