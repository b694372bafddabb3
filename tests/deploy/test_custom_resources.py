"""Custom resources against models that are generated from their definitions."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from tests.deploy.rendering import Object, combined, needs_kustomize, overlay

pytestmark = [needs_kustomize, pytest.mark.slow]

MODULES = {
    "cert-manager.io/v1": "cloudcoil.models.cert_manager.v1",
    "keda.sh/v1alpha1": "cloudcoil.models.keda.v1alpha1",
    "monitoring.coreos.com/v1": "cloudcoil.models.prometheus_operator.v1",
}


def custom_resources() -> list[Object]:
    everything = combined(("redis-development", "cert-manager", "monitoring", "autoscaling-keda", "client-tls"))
    return [one for one in [*everything.objects, *overlay("production").objects] if is_custom(one)]


def is_custom(one: Object) -> bool:
    return "." in one["apiVersion"] and not one["apiVersion"].split("/")[0].endswith(".k8s.io")


def check(one: Object) -> None:
    """Raise ValueError for a bad field; AssertionError for an unknown one, which the models drop."""
    model: Any = getattr(import_module(MODULES[one["apiVersion"]]), one["kind"])
    parsed = model.model_validate(one).model_dump(mode="json", by_alias=True, exclude_unset=True)
    assert parsed == one


def test_every_custom_resource_follows_its_definition() -> None:
    resources = custom_resources()
    assert {one["kind"] for one in resources} == {
        "Certificate", "Issuer", "PodMonitor", "PrometheusRule", "ScaledObject",
    }  # fmt: skip
    for one in resources:
        check(one)


@pytest.mark.parametrize("change", [{"cooldownPeriods": 1}, {"cooldownPeriod": "soon"}, {"scaleTargetRef": {}}])
def test_a_wrong_field_of_a_custom_resource_is_noticed(change: dict[str, Any]) -> None:
    (one,) = [each for each in custom_resources() if each["metadata"]["name"] == "decant-decode-worker"][:1]
    with pytest.raises((ValueError, AssertionError)):
        check({**one, "spec": {**one["spec"], **change}})
