"""Requests and tokens by tenant and by adapter, each with a bounded number of labels."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decant.runtime.telemetry.metrics import Registry

MAX_TENANTS = 100
OTHER_TENANTS = "other"
MAX_ADAPTERS = 100
OTHER_ADAPTERS = "other"


class TenantMetrics:
    def __init__(self, registry: Registry, tenants: Iterable[str]) -> None:
        label = ("tenant",)
        self._requests = registry.counter(
            "tenant_requests_total", "Requests of a tenant that ended or lost their client.", label
        )
        self._refused = registry.counter(
            "tenant_requests_refused_total", "Requests of a tenant that were refused.", label
        )
        self._prompt = registry.counter("tenant_prompt_tokens_total", "Prompt tokens of a tenant's requests.", label)
        self._generated = registry.counter("tenant_generation_tokens_total", "Output tokens sent to a tenant.", label)
        self._labels = frozenset(islice(tenants, MAX_TENANTS))
        for name in (*self._labels, OTHER_TENANTS):
            for counter in (self._requests, self._refused, self._prompt, self._generated):
                counter.labels(name)

    def count_request(self, tenant: str, prompt_tokens: int) -> None:
        self._requests.labels(self._label(tenant)).inc()
        self._prompt.labels(self._label(tenant)).inc(prompt_tokens)

    def count_tokens(self, tenant: str, tokens: int) -> None:
        self._generated.labels(self._label(tenant)).inc(tokens)

    def count_refusal(self, tenant: str) -> None:
        self._refused.labels(self._label(tenant)).inc()

    def _label(self, tenant: str) -> str:
        return tenant if tenant in self._labels else OTHER_TENANTS


class KvEventMetrics:
    """Of `SubscribeKvEvents`; 0 where it is off."""

    def __init__(self, registry: Registry) -> None:
        self.bytes = registry.gauge(
            "kv_event_memory_bytes", "Memory of tokens of cached blocks and of batches of KV events, as estimated."
        )
        self.subscribers = registry.gauge("kv_event_subscribers", "Calls of SubscribeKvEvents that are open.")


class AdapterMetrics:
    """Requests with an adapter. The first MAX_ADAPTERS names are labels, all others are OTHER_ADAPTERS."""

    def __init__(self, registry: Registry) -> None:
        label = ("adapter",)
        self._requests = registry.counter(
            "adapter_requests_total", "Requests with an adapter that ended or lost their client.", label
        )
        self._prompt = registry.counter(
            "adapter_prompt_tokens_total", "Prompt tokens of the requests with an adapter.", label
        )
        self._generated = registry.counter(
            "adapter_generation_tokens_total", "Output tokens sent of requests with an adapter.", label
        )
        self._labels: set[str] = set()

    def count_request(self, adapter: str, prompt_tokens: int) -> None:
        if adapter:
            label = self._label(adapter)
            self._requests.labels(label).inc()
            self._prompt.labels(label).inc(prompt_tokens)

    def count_tokens(self, adapter: str, tokens: int) -> None:
        if adapter:
            self._generated.labels(self._label(adapter)).inc(tokens)

    def _label(self, adapter: str) -> str:
        if len(self._labels) < MAX_ADAPTERS:
            self._labels.add(adapter)
        return adapter if adapter in self._labels else OTHER_ADAPTERS
