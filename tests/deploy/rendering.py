"""The manifests that `kubectl apply -k deploy/base` sends."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
BASE = ROOT / "deploy" / "base"

Object = dict[str, Any]


def rendered() -> list[Object]:
    if shutil.which("kubectl") is None:
        return plainly(BASE)
    return by_kubectl(BASE)


def by_kubectl(folder: Path) -> list[Object]:
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True, timeout=60)
    return _documents(done.stdout)


def plainly(folder: Path) -> list[Object]:
    (kustomization,) = _documents((folder / "kustomization.yaml").read_text())
    assert kustomization.keys() == {"apiVersion", "kind", "namespace", "resources"}
    objects = [one for name in kustomization["resources"] for one in _documents((folder / name).read_text())]
    for one in objects:
        if one["kind"] != "Namespace":
            one["metadata"]["namespace"] = kustomization["namespace"]
    return objects


def _documents(text: str) -> list[Object]:
    return [document for document in yaml.safe_load_all(text) if document]
