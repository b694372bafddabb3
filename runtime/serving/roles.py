"""Roles of callers by the DNS names in their certificates, under mutual TLS.

            administrative services    other services of the process
administrator          yes                       no
any other              no                        yes
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import grpc

from decant.runtime.errors import PermissionDenied

_NAMES = "peer_dns"
"""gRPC's property of DNS names alone; ``x509_subject_alternative_name`` has addresses of mail and URIs among them."""


class CallerRoles:
    """``admin_name`` is the name of administrators; None: every caller has both roles.

    ``administrative`` and ``others`` are full names of services; those in neither are open to all, such as health.
    """

    def __init__(self, admin_name: str | None, administrative: Collection[str], others: Collection[str]) -> None:
        self._admin_name = None if admin_name is None else admin_name.encode()
        self._administrative = frozenset(administrative)
        self._others = frozenset(others)

    def check(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Raise PermissionDenied for a call of "/package.Service/Method" by another role."""
        service = method[1:].partition("/")[0]
        if self._admin_name is None or service not in self._administrative | self._others:
            return
        is_admin = self._admin_name in context.auth_context().get(_NAMES, ())
        if is_admin != (service in self._administrative):
            raise PermissionDenied(
                f"{method[1:]}, with a certificate of {'an administrator' if is_admin else 'a peer'}"
            )
