"""Adapters by the names that requests use."""

from __future__ import annotations

from decant.router.execution.registry import RequestRegistry
from decant.router.text.served_model import Models
from decant.runtime.errors import NotFound


class AdapterNames:
    """Looks up what the usable workers have now."""

    def __init__(self, registry: RequestRegistry) -> None:
        self._registry = registry

    def base_and_adapter(self, model: str, adapter: str, models: Models) -> tuple[str, str]:
        """Return the names of model and adapter for a request whose model may be an adapter's name."""
        if not self.is_unknown(model, adapter, models):
            return model, adapter
        base = next((id for id in models.by_id if model in self._registry.adapters(id)), None)
        return (model, adapter) if base is None else (base, model)

    @staticmethod
    def is_unknown(model: str, adapter: str, models: Models) -> bool:
        """Whether ``model`` names no model, and so perhaps an adapter."""
        return bool(model) and not adapter and not models.knows(model)

    def digest(self, adapter: str, model: str) -> str:
        """Return the digest of the model's adapter with that name, empty for none. Raises NotFound."""
        if not adapter:
            return ""
        adapters = self._registry.adapters(model)
        if adapter not in adapters:
            raise NotFound("adapter", adapter, adapters)
        return adapters[adapter].digest
