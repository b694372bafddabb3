"""Addresses of routers as gRPC targets.

localhost                       localhost:50051
10.0.0.1:9000, [::1], router    the same, with default port 50051
http://router:9000              router:9000, plaintext; https:// with TLS; grpc:// and grpcs:// likewise
dns:///router                   dns:///router:50051
ipv4:, ipv6:, unix:, xds: ...   unchanged: gRPC's own schemes
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from decant.runtime.grpc_options import PORT

_LISTS = ("ipv4:", "ipv6:")
_GRPC_OWN = re.compile(r"(ipv4|ipv6|unix|unix-abstract|vsock|xds|google-c2p):", re.IGNORECASE)
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.IGNORECASE)
_WITH_TLS = {"http": False, "grpc": False, "https": True, "grpcs": True}


def targets(addresses: str | Sequence[str], *, tls: bool = False) -> tuple[str, ...]:
    """Targets of routers separated by commas; ``ipv4:`` and ``ipv6:`` may list addresses.

    Raises ValueError without an address, for an invalid one, and for a scheme that contradicts `tls`.
    """
    listed = [addresses] if isinstance(addresses, str) else addresses
    if not isinstance(listed, Sequence) or not all(isinstance(one, str) for one in listed):
        raise ValueError(f"address: 'host:port', or several with commas between them, got {addresses!r}")
    parts = [part.strip() for one in listed for part in ([one] if one.startswith(_LISTS) else one.split(","))]
    if not parts or not all(parts):
        raise ValueError(f"address: 'host:port', or several with commas between them, got {addresses!r}")
    return tuple(dict.fromkeys(_target(part, tls) for part in parts))


def _target(text: str, tls: bool) -> str:
    if _GRPC_OWN.match(text):
        return text
    match = _SCHEME.fullmatch(text)
    if match is None:
        return _with_port(text, text)
    scheme, rest = match[1].lower(), match[2]
    if scheme == "dns":
        authority, slash, name = rest.rpartition("/")
        return f"dns://{authority}{slash}{_with_port(name, text)}"
    if scheme not in _WITH_TLS:
        raise ValueError(
            f"address: host:port, grpc://, http://, https:// or a gRPC scheme such as dns:///, got {text!r}"
        )
    if _WITH_TLS[scheme] and not tls:
        raise ValueError(f"address: {scheme}:// means TLS: give its roots too (tls=Tls(ca=...), --ca), got {text!r}")
    if not _WITH_TLS[scheme] and tls:
        raise ValueError(f"address: {scheme}:// means plaintext, but tls= is set: leave one out, got {text!r}")
    return _with_port(rest.removesuffix("/"), text)


def _with_port(host: str, text: str) -> str:
    if host.count(":") > 1 and not host.startswith("["):  # IPv6 without brackets
        return f"[{host}]:{PORT}"
    match = re.fullmatch(r"(\[[^\]]+\]|[^\[\]:/?#\s]+)(?::(\d+))?", host)
    if match is None or not 0 < int(match[2] or PORT) < 65536:
        raise ValueError(f"address: host:port with a port from 1 to 65535, got {text!r}")
    return host if match[2] else f"{host}:{PORT}"
