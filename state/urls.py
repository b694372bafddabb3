"""URLs of Redis: one address, or the sentinels that know the primary's.

redis://[[user]:password@]host[:6379][/db]        unix:///path
redis+sentinel://[[user]:password@]host[:26379][,host[:port]...]/service[/db][?sentinel_password=...]

rediss:// and rediss+sentinel:// are the same with TLS, to the sentinels too. Options such as ?ssl_ca_certs=/path are
those of redis-py. User and password are those of Redis; sentinels have none, or `sentinel_username` and
`sentinel_password`.

All of them take ?key_prefix=TEXT, which comes before the name of each key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from redis.asyncio.connection import parse_url

SENTINEL_PORT = 26379
SENTINEL = "+sentinel"
SCHEMES = ("redis://", "rediss://", "unix://", f"redis{SENTINEL}://", f"rediss{SENTINEL}://")
CLUSTER_REFUSAL = "a Redis that is no Cluster, among whose nodes Decant does not divide its commands"

_PREFIX_OPTION = "key_prefix"
_PREFIX = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")
_PORT_LIMIT = "host:port with a port from 0 to 65535"


class BadUrl(ValueError):
    """An invalid URL; ``value`` never contains a password."""

    def __init__(self, limit: str, value: str) -> None:
        super().__init__(f"url: {limit}, got {value}")
        self.limit = limit
        self.value = value


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """What a URL of sentinels says; ``connection`` and ``sentinel`` are redis-py's options of connections."""

    addresses: tuple[tuple[str, int], ...]
    service: str
    connection: Mapping[str, Any]
    sentinel: Mapping[str, Any]


def check_url(url: str) -> None:
    """Check the form of a URL. Raises BadUrl."""
    scheme = url.partition("://")[0]
    if "cluster" in scheme:
        raise BadUrl(CLUSTER_REFUSAL, scheme)
    if not url.startswith(SCHEMES):
        raise BadUrl(f"begins with one of {', '.join(SCHEMES)}", scheme)
    url, _ = split_key_prefix(url)
    if is_of_sentinels(url):
        parse_sentinel_url(url)
        return
    try:
        urlsplit(url).port  # noqa: B018 - raises
    except ValueError:
        raise BadUrl(_PORT_LIMIT, "another port") from None


def split_key_prefix(url: str) -> tuple[str, str]:
    """Return the URL without its `key_prefix`, and that; "" if it has none. Raises BadUrl."""
    base, mark, query = url.partition("?")
    options = parse_qsl(query, keep_blank_values=True)
    found = [value for name, value in options if name == _PREFIX_OPTION]
    if not found:
        return url, ""
    if len(found) > 1 or not _PREFIX.fullmatch(found[0]):
        raise BadUrl(f"one {_PREFIX_OPTION}, of 1 to 64 letters, digits and _ . : / -", repr(found[-1]))
    rest = urlencode([(name, value) for name, value in options if name != _PREFIX_OPTION])
    return base + (mark if rest else "") + rest, found[0]


def is_of_sentinels(url: str) -> bool:
    return url.partition("://")[0].endswith(SENTINEL)


def parse_sentinel_url(url: str) -> SentinelUrl:
    """Raises BadUrl."""
    parts = urlsplit(url)
    credentials, at, hosts = parts.netloc.rpartition("@")
    service, _, db = parts.path.strip("/").partition("/")
    if not service:
        raise BadUrl("a path with the service that the sentinels watch, such as /mymaster", f"a path {parts.path!r}")
    if db and not db.isdecimal():
        raise BadUrl("/service/db with the number of a database", f"/{service}/{db}")
    addresses = tuple(map(_address, hosts.split(",")))
    scheme = parts.scheme.removesuffix(SENTINEL)
    try:
        options: dict[str, Any] = dict(parse_url(f"{scheme}://{credentials}{at}sentinel/{db}?{parts.query}"))
    except ValueError as error:
        raise BadUrl("options of redis-py", str(error)) from None
    del options["host"]
    own = {name.removeprefix("sentinel_"): options.pop(name) for name in [*options] if name.startswith("sentinel_")}
    if unknown := own.keys() - {"username", "password"}:
        raise BadUrl("sentinel_username and sentinel_password as options of sentinels", f"sentinel_{min(unknown)}")
    has_tls = options.pop("connection_class", None) is not None
    tls = {name: value for name, value in options.items() if name.startswith("ssl_")}
    return SentinelUrl(addresses, service, {**options, "ssl": has_tls}, {**own, **tls, "ssl": has_tls})


def _address(text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise BadUrl(_PORT_LIMIT, "another port") from None
    if not host:
        raise BadUrl("host[:port] of each sentinel, separated by commas", "an empty host")
    return host, SENTINEL_PORT if port is None else port
