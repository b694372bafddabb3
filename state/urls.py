"""URLs of Redis: one address, the sentinels that know the primary's, or nodes of a Cluster.

redis://[[user]:password@]host[:6379][/db]        unix:///path
redis+sentinel://[[user]:password@]host[:26379][,host[:port]...]/service[/db][?sentinel_password=...]
redis+cluster://[[user]:password@]host[:6379][,host[:port]...]

rediss://, rediss+sentinel:// and rediss+cluster:// are the same with TLS, to the sentinels too. Options such as
?ssl_ca_certs=/path are those of redis-py. User and password are those of Redis; sentinels have none, or
`sentinel_username` and `sentinel_password`.

All of them take ?key_prefix=TEXT, which comes before the name of each key. In a Cluster it is in braces, and {decant}
unless set: this hash tag decides the one slot of all keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from redis.asyncio.connection import Connection, SSLConnection, parse_url
from redis.exceptions import RedisError

SENTINEL_PORT = 26379
REDIS_PORT = 6379
SENTINEL = "+sentinel"
CLUSTER = "+cluster"
SCHEMES = (
    *("redis://", "rediss://", "unix://"),
    *(f"redis{tls}{kind}://" for kind in (SENTINEL, CLUSTER) for tls in ("", "s")),
)
DEFAULT_HASH_TAG = "decant"

_PREFIX_OPTION = "key_prefix"
_PREFIX = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")
_OPTIONS_LIMIT = "options of redis-py's connections"
OWN_OPTIONS = frozenset(
    [
        "connection_class",
        "credential_provider",
        "decode_responses",
        "encoding",
        "encoding_errors",
        "host",
        "max_connections",
        "path",
        "port",
        "protocol",
        "redis_connect_func",
        "retry",
        "retry_on_error",
        "retry_on_timeout",
        "socket_connect_timeout",
        "socket_timeout",
        "timeout",
    ]
)
"""They would change the address, what replies are or the deadline of a call, or are objects and no texts."""
_TLS_FILES = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"})
_HASHED_NAME = re.compile(r"[0-9a-f]{8}\.[0-9]+")
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


@dataclass(frozen=True, slots=True)
class ClusterUrl:
    """What a URL of a Cluster says: some of its nodes, and redis-py's options of connections."""

    addresses: tuple[tuple[str, int], ...]
    connection: Mapping[str, Any]


def check_url(url: str) -> None:
    """Check the form of a URL. Raises BadUrl."""
    scheme = url.partition("://")[0]
    if not url.startswith(SCHEMES):
        raise BadUrl(f"begins with one of {', '.join(SCHEMES)}", scheme)
    url, _ = split_key_prefix(url)
    if is_of_sentinels(url):
        parse_sentinel_url(url)
        return
    if is_of_cluster(url):
        parse_cluster_url(url)
        return
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises
    except ValueError:
        raise BadUrl(_PORT_LIMIT, "another port") from None
    db = parts.path.strip("/")
    if parts.scheme != "unix" and db and not db.isdecimal():
        raise BadUrl("a path with the number of a database, such as /1", f"a path {parts.path!r}")
    _check_options(_parse_options(url))


def split_key_prefix(url: str) -> tuple[str, str]:
    """Return the URL without its `key_prefix`, and what comes before each key, such as "". Raises BadUrl."""
    rest, prefix = _split_prefix_option(url)
    return rest, f"{{{prefix or DEFAULT_HASH_TAG}}}" if is_of_cluster(url) else prefix


def _split_prefix_option(url: str) -> tuple[str, str]:
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


def is_of_cluster(url: str) -> bool:
    return url.partition("://")[0].endswith(CLUSTER)


def parse_cluster_url(url: str) -> ClusterUrl:
    """Raises BadUrl."""
    parts = urlsplit(url)
    if parts.path.strip("/"):
        raise BadUrl("no path: a Cluster has one database", f"a path {parts.path!r}")
    addresses, options = _parse_hosts(url, CLUSTER, "", REDIS_PORT)
    if "db" in options:
        raise BadUrl("no option db: a Cluster has one database", "db")
    _check_options(options)
    options["ssl"] = options.pop("connection_class", None) is not None
    return ClusterUrl(addresses, options)


def parse_sentinel_url(url: str) -> SentinelUrl:
    """Raises BadUrl."""
    parts = urlsplit(url)
    service, _, db = parts.path.strip("/").partition("/")
    if not service:
        raise BadUrl("a path with the service that the sentinels watch, such as /mymaster", f"a path {parts.path!r}")
    if db and not db.isdecimal():
        raise BadUrl("/service/db with the number of a database", f"/{service}/{db}")
    addresses, options = _parse_hosts(url, SENTINEL, db, SENTINEL_PORT)
    own = {name.removeprefix("sentinel_"): options.pop(name) for name in [*options] if name.startswith("sentinel_")}
    if unknown := own.keys() - {"username", "password"}:
        raise BadUrl("sentinel_username and sentinel_password as options of sentinels", f"sentinel_{min(unknown)}")
    _check_options(options)
    has_tls = options.pop("connection_class", None) is not None
    tls = {name: value for name, value in options.items() if name.startswith("ssl_")}
    return SentinelUrl(addresses, service, {**options, "ssl": has_tls}, {**own, **tls, "ssl": has_tls})


def _parse_hosts(url: str, kind: str, db: str, port: int) -> tuple[tuple[tuple[str, int], ...], dict[str, Any]]:
    """Addresses, with ``port`` for those without one, and redis-py's options of a URL with several hosts."""
    parts = urlsplit(url)
    credentials, at, hosts = parts.netloc.rpartition("@")
    addresses = tuple(_address(host, port) for host in hosts.split(","))
    scheme = parts.scheme.removesuffix(kind)
    options = _parse_options(f"{scheme}://{credentials}{at}host/{db}?{parts.query}")
    del options["host"]
    return addresses, options


def _parse_options(url: str) -> dict[str, Any]:
    if own := OWN_OPTIONS.intersection(name for name, _ in parse_qsl(urlsplit(url).query, keep_blank_values=True)):
        raise BadUrl("no option that Decant decides itself", min(own))
    try:
        return dict(parse_url(url))
    except ValueError as error:
        raise BadUrl(_OPTIONS_LIMIT, str(error)) from None


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse what no connection takes, as else each would fail when it opens."""
    connection = dict(options)
    kind = connection.pop("connection_class", Connection)
    try:
        made = kind(**connection)
    except (TypeError, ValueError, RedisError) as error:
        raise BadUrl(_OPTIONS_LIMIT, str(error).rpartition("argument ")[2]) from None
    if isinstance(made, SSLConnection):
        _check_tls(made, options)


def _check_tls(connection: SSLConnection, options: Mapping[str, Any]) -> None:
    """Refuse files that no connection could use: each connection would fail, as if Redis were unavailable."""
    for name in _TLS_FILES & options.keys():
        try:
            with Path(options[name]).open("rb"):
                pass
        except OSError as error:
            raise BadUrl(f"{name}: a file that can be read ({error.strerror})", options[name]) from None
    if "ssl_ca_path" in options:
        _check_ca_folder(options["ssl_ca_path"])
    if "ssl_keyfile" in options and "ssl_certfile" not in options:
        raise BadUrl("ssl_certfile beside ssl_keyfile", "ssl_keyfile alone")
    try:
        connection.ssl_context.get()
    except (OSError, ValueError, RedisError) as error:
        raise BadUrl("options ssl_* that fit together, with PEM files", str(error)) from None


def _check_ca_folder(folder: str) -> None:
    """Refuse a folder in which OpenSSL, which says nothing of it, finds no certificate."""
    try:
        names = [file.name for file in Path(folder).iterdir()]
    except OSError as error:
        raise BadUrl(f"ssl_ca_path: a folder that can be read ({error.strerror})", folder) from None
    if not any(_HASHED_NAME.fullmatch(name) for name in names):
        raise BadUrl("ssl_ca_path: a folder with certificates as `openssl rehash` names them", folder)


def _address(text: str, default_port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise BadUrl(_PORT_LIMIT, "another port") from None
    if not host:
        raise BadUrl("host[:port] of each server, separated by commas", "an empty host")
    return host, default_port if port is None else port
