from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from decant.router.admission.model_admission import ModelAdmission
from decant.router.placement.capacity import PoolCapacity
from decant.router.settings import RouterSettings


class AdmissionControl:
    """Admission of each model; ``measure`` gives the capacity of a model's workers."""

    def __init__(self, settings: RouterSettings, models: Iterable[str], measure: Callable[[str], PoolCapacity]) -> None:
        self._models = {model: ModelAdmission(settings, partial(measure, model)) for model in models}

    def of(self, model: str) -> ModelAdmission:
        return self._models[model]

    def grant(self, model: str) -> None:
        """Start waiting requests of ``model``: its workers have reported."""
        self._models[model].grant()

    @property
    def active(self) -> int:
        return sum(admission.active for admission in self._models.values())

    @property
    def waiting(self) -> int:
        return sum(admission.waiting for admission in self._models.values())
