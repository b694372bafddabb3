"""The objects that `kubectl apply -k` sends for an overlay, or for the base with any components."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import combinations, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

import decant.decode_worker.main
import decant.prefill_worker.main
from decant.router.settings import RouterSettings
from decant.runtime.settings import PREFIX, Settings
from decant.runtime.settings_sources import load

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPONENTS = {folder.name for folder in (DEPLOY / "components").iterdir()}
VERSION = "1.33"
"""Of Kubernetes."""
OVERLAYS = sorted(folder.name for folder in (DEPLOY / "overlays").iterdir() if (folder / "kustomization.yaml").exists())

Object = dict[str, Any]

PROCESSES: Mapping[str, type[Settings]] = {
    "router": RouterSettings,
    "prefill-worker": decant.prefill_worker.main.ROLE.settings,
    "decode-worker": decant.decode_worker.main.ROLE.settings,
}
SECRETS = {("decant-redis", "url"): "rediss://decant:secret@redis.example:6379", ("decant-hub", "token"): "hf_secret"}
"""What the Secrets that a user makes could hold."""

CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "redis": ("redis-development", "redis-external"),
    "weights": (None, "weights-pvc", "weights-image", "weights-hub"),
    "scaling": (None, "autoscaling-hpa", "autoscaling-keda"),
    "clients": (None, "client-tls", "openai-gateway"),
    **{
        name: (None, name)
        for name in (
            "cert-manager",
            "monitoring",
            "gpu",
            "rdma",
            "opentelemetry",
            "availability",
            "openshift",
        )
    },
}
"""Of each line, a deployment has one component, or none, in this order."""

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

needs_kustomize = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="renders manifests with kubectl, which is not on PATH"
)


def combinations_of_components() -> Iterator[tuple[str, ...]]:
    """Combinations in which each two components of different lines meet, and each two lines without one."""
    uncovered: set[frozenset[tuple[str, str | None]]] = {
        frozenset(((one, a), (other, b)))
        for one, other in combinations(CHOICES, 2)
        for a, b in product(CHOICES[one], CHOICES[other])
    }
    while uncovered:
        first = min(uncovered, key=sorted_pair)
        chosen = dict(sorted(first))
        for line, options in CHOICES.items():
            if line not in chosen:
                others = list(chosen.items())
                new = {one: sum(frozenset(((line, one), each)) in uncovered for each in others) for one in options}
                chosen[line] = max(new, key=lambda one: (new[one], one or ""))
        uncovered -= {frozenset(pair) for pair in combinations(chosen.items(), 2)}
        yield tuple(name for name in chosen.values() if name is not None)


def sorted_pair(pair: frozenset[tuple[str, str | None]]) -> list[tuple[str, str]]:
    return sorted((line, one or "") for line, one in pair)


class Manifests:
    def __init__(self, objects: Iterable[Object]) -> None:
        self.objects = list(objects)
        self._settings: dict[str, Any] = {}
        self.deployments = self.of_kind("Deployment")
        self.processes = {name: self.deployments[f"decant-{name}"] for name in PROCESSES}

    def of_kind(self, kind: str) -> dict[str, Object]:
        return {one["metadata"]["name"]: one for one in self.objects if one["kind"] == kind}

    def environment(self, name: str) -> dict[str, str]:
        one = container(self.processes[name])
        maps = [self.of_kind("ConfigMap")[source["configMapRef"]["name"]]["data"] for source in one["envFrom"]]
        variables: dict[str, str] = {key: value for data in maps for key, value in data.items()}
        for entry in one["env"]:
            variables[entry["name"]] = _value(entry, one, variables)
        return variables

    def settings(self, name: str) -> Any:
        if name not in self._settings:
            self._settings[name] = self._load(name)
        return self._settings[name]

    def _load(self, name: str) -> Any:
        _, *arguments = container(self.processes[name])["args"]
        variables = {key: value for key, value in self.environment(name).items() if key.startswith(PREFIX)}
        return load(PROCESSES[name], arguments, variables)

    def mounted_secrets(self, name: str) -> dict[str, str]:
        volumes = pod(self.processes[name])["volumes"]
        secrets = {one["name"]: one["secret"]["secretName"] for one in volumes if "secret" in one}
        mounts = container(self.processes[name])["volumeMounts"]
        return {mount["mountPath"]: secrets[mount["name"]] for mount in mounts if mount["name"] in secrets}


@cache
def overlay(name: str) -> Manifests:
    return Manifests(_kustomize(DEPLOY / "overlays" / name))


@cache
def combined(components: tuple[str, ...]) -> Manifests:
    with TemporaryDirectory() as folder:
        text = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [os.path.relpath(DEPLOY / "base", folder)],
            "components": [os.path.relpath(DEPLOY / "components" / name, folder) for name in components],
        }
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(text))
        return Manifests(_kustomize(Path(folder)))


def _kustomize(folder: Path) -> list[Object]:
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.load_all(done.stdout, Loader=LOADER) if document]


def _value(entry: Object, one: Object, before: Mapping[str, str]) -> str:
    if "value" in entry:
        return re.sub(r"\$\((\w+)\)", lambda match: before[match[1]], entry["value"])
    source = entry["valueFrom"]
    if "resourceFieldRef" in source:
        section, resource = source["resourceFieldRef"]["resource"].split(".")
        return str(one["resources"][section][resource])
    if "secretKeyRef" in source:
        return SECRETS[source["secretKeyRef"]["name"], source["secretKeyRef"]["key"]]
    return {"status.podIP": "10.1.2.3"}[source["fieldRef"]["fieldPath"]]


def pod(deployment: Object) -> Object:
    spec: Object = deployment["spec"]["template"]["spec"]
    return spec


def container(deployment: Object) -> Object:
    (only,) = pod(deployment)["containers"]
    return dict(only)


def labels(deployment: Object) -> dict[str, str]:
    found: dict[str, str] = deployment["spec"]["template"]["metadata"]["labels"]
    return found


def selects(selector: Object, deployment: Object) -> bool:
    own = labels(deployment)
    by_label = selector.get("matchLabels", {}).items() <= own.items()
    return by_label and all(
        {"In": own.get(rule["key"]) in rule["values"]}[rule["operator"]]
        for rule in selector.get("matchExpressions", [])
    )
