"""What holds for every deployment: each overlay, and combinations in which each two components meet."""

from __future__ import annotations

import json
import re
from functools import cache

import kubernetes_validate
import pytest

from decant.command.app import app
from decant.runtime.byte_size import parse_byte_size
from decant.runtime.serving.server import CLEANUP_SECONDS
from tests.deploy.rendering import (
    CHOICES,
    COMPONENTS,
    OVERLAYS,
    PROCESSES,
    SECRETS,
    VERSION,
    Manifests,
    combinations_of_components,
    combined,
    container,
    labels,
    needs_kustomize,
    overlay,
    pod,
    selects,
)

pytestmark = needs_kustomize

CUSTOM = {"cert-manager.io", "keda.sh", "monitoring.coreos.com"}
COMBINATIONS = ["+".join(names) for names in combinations_of_components()]
DEPLOYMENTS = [*OVERLAYS, *(pytest.param(names, marks=pytest.mark.slow) for names in COMBINATIONS)]


@cache
def validate_once(text: str) -> None:
    kubernetes_validate.validate(json.loads(text), VERSION, strict=True)


@pytest.fixture(scope="module", params=DEPLOYMENTS)
def manifests(request: pytest.FixtureRequest) -> Manifests:
    name: str = request.param
    return overlay(name) if name in OVERLAYS else combined(tuple(name.split("+")))


def test_every_component_is_part_of_a_combination() -> None:
    assert {name for options in CHOICES.values() for name in options if name} == COMPONENTS
    assert {name for names in combinations_of_components() for name in names} == COMPONENTS


def test_every_object_is_valid(manifests: Manifests) -> None:
    for one in manifests.objects:
        if one["apiVersion"].split("/")[0] not in CUSTOM:  # tests/deploy/test_custom_resources.py
            validate_once(json.dumps(one))
        if one["kind"] != "Namespace":
            assert one["metadata"]["namespace"] == "decant"


def test_every_variable_and_flag_is_a_setting_that_the_process_accepts(manifests: Manifests) -> None:
    commands = {command.name or command.callback.__name__.replace("_", "-") for command in app.registered_commands}  # type: ignore[union-attr]
    for name in PROCESSES:
        manifests.settings(name)
        one = container(manifests.processes[name])
        assert one["args"][0] == name
        assert name in commands
        assert "command" not in one, "the image's entrypoint is `decant`"


def test_ports_are_those_that_are_served_and_probed(manifests: Manifests) -> None:
    for name in PROCESSES:
        one, settings = container(manifests.processes[name]), manifests.settings(name)
        ports = {port["name"]: port["containerPort"] for port in one["ports"]}
        assert ports == {"grpc": settings.port, "metrics": settings.admin_port}
        assert settings.host == "0.0.0.0"
        assert settings.advertise == f"10.1.2.3:{settings.port}"
        for probe, service in (("startupProbe", "alive"), ("readinessProbe", "ready"), ("livenessProbe", "alive")):
            if settings.tls == "none":
                assert one[probe]["grpc"] == {"port": settings.port, "service": service}
            else:  # native gRPC probes speak plaintext
                assert one[probe]["httpGet"] == {"port": "metrics", "path": f"/{service}"}


def test_processes_authenticate_each_other_with_one_certificate(manifests: Manifests) -> None:
    for name in PROCESSES:
        settings = manifests.settings(name)
        assert settings.tls in (("none", "server") if name == "router" else ("mutual",)), "routers have --credentials"
        files = [settings.peer_ca, settings.peer_certificate, settings.peer_key]
        if name != "router":
            files += [settings.tls_client_ca, settings.tls_certificate, settings.tls_key]
            assert settings.allow_unauthenticated_peers == (settings.handoff == "nixl")
        assert [file.name for file in files[:3]] == ["ca.crt", "tls.crt", "tls.key"]
        assert [file.name for file in files[3:]] in ([], ["ca.crt", "tls.crt", "tls.key"])
        assert {manifests.mounted_secrets(name)[str(file.parent)] for file in files} == {"decant-peers"}
        assert settings.peer_name == "peer.decant.internal"


def test_the_grace_period_covers_deregistration_drain_and_shutdown(manifests: Manifests) -> None:
    for name, deployment in manifests.processes.items():
        before = container(deployment)["lifecycle"]["preStop"]["sleep"]["seconds"]
        grace = pod(deployment)["terminationGracePeriodSeconds"]
        assert before >= 10
        assert grace >= before + manifests.settings(name).drain_seconds + CLEANUP_SECONDS


def test_workers_get_the_threads_and_memory_of_their_settings(manifests: Manifests) -> None:
    for name in ("prefill-worker", "decode-worker"):
        settings, limits = manifests.settings(name), container(manifests.processes[name])["resources"]["limits"]
        assert settings.threads == int(limits["cpu"])
        if "nvidia.com/gpu" in limits:
            assert settings.device == "cuda"
            assert settings.kv_bytes is None, "what the GPU has left"
        else:
            assert settings.kv_bytes <= parse_byte_size(limits["memory"]) // 2
        (shared,) = [one for one in pod(manifests.processes[name])["volumes"] if one["name"] == "shm"]
        assert shared["emptyDir"]["medium"] == "Memory"


def test_router_and_workers_serve_the_same_model_over_the_same_redis(manifests: Manifests) -> None:
    router = manifests.settings("router")
    ((id, source),) = [text.split("=") if "=" in text else (None, text) for text in router.models]
    for name in ("prefill-worker", "decode-worker"):
        settings = manifests.settings(name)
        assert (settings.model, settings.model_id) == (source, id)
        assert settings.redis_url == router.redis_url
    host, port = re.search(r"([\w.-]+):(\d+)$", router.redis_url).groups()  # type: ignore[union-attr]
    services = manifests.of_kind("Service")
    if host in services:
        assert int(port) in {one["port"] for one in services[host]["spec"]["ports"]}


def test_no_secret_is_in_a_config_map_or_a_manifest(manifests: Manifests) -> None:
    assert not manifests.of_kind("Secret")
    for one in manifests.of_kind("ConfigMap").values():
        for key, value in one["data"].items():
            assert not re.search(r"PASSWORD|TOKEN$|SECRET", key)
            assert not re.search(r"://[^/\s]*@|hf_\w{8}|BEGIN [A-Z ]*PRIVATE KEY", value), key
    for deployment in manifests.deployments.values():
        for entry in container(deployment).get("env", []):
            if entry["name"] in ("DECANT_REDIS_URL", "HF_TOKEN"):
                reference = entry["valueFrom"]["secretKeyRef"]
                assert (reference["name"], reference["key"]) in SECRETS


def test_every_port_of_a_pod_is_in_a_network_policy_and_only_clients_come_from_anywhere(manifests: Manifests) -> None:
    policies = [one["spec"] for one in manifests.of_kind("NetworkPolicy").values()]
    for name, deployment in manifests.deployments.items():
        rules = [rule for one in policies if selects(one["podSelector"], deployment) for rule in one["ingress"]]
        assert rules, "a pod that no policy selects is open"
        ports = {port["containerPort"] for port in container(deployment)["ports"]}
        assert {port["port"] for rule in rules for port in rule.get("ports", [])} == ports
        open_ports = {port["port"] for rule in rules if "from" not in rule for port in rule["ports"]}
        assert open_ports == {"decant-router": {50051}, "decant-openai": {8000}}.get(name, set())
    for one in policies:
        assert one["policyTypes"] == ["Ingress"]
        assert any(selects(one["podSelector"], each) for each in manifests.deployments.values())
        for peer in (peer for rule in one["ingress"] for peer in rule.get("from", [])):
            if "podSelector" in peer:
                assert any(selects(peer["podSelector"], each) for each in manifests.deployments.values())


def test_a_pod_may_do_no_more_than_it_needs(manifests: Manifests) -> None:
    (namespace,) = manifests.of_kind("Namespace").values()
    level = namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    for deployment in manifests.deployments.values():
        spec, one = pod(deployment), container(deployment)
        assert spec["enableServiceLinks"] is False
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"].get("runAsUser", 10001) > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        context = one["securityContext"]
        added = context["capabilities"].pop("add", [])
        assert added in ([], ["IPC_LOCK"])
        assert level == "restricted" or "rdma/hca" in str(manifests.objects)
        assert context == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        context["capabilities"].update({"add": added} if added else {})
        assert "memory" in one["resources"]["limits"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert not any("hostPath" in volume for volume in spec["volumes"])


def test_selectors_mounts_and_services_match(manifests: Manifests) -> None:
    for deployment in manifests.deployments.values():
        assert deployment["spec"]["selector"]["matchLabels"].items() <= labels(deployment).items()
        mounted = {mount["name"] for mount in container(deployment)["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod(deployment)["volumes"]}
    for service in manifests.of_kind("Service").values():
        spec = service["spec"]
        (match,) = [one for one in manifests.deployments.values() if spec["selector"].items() <= labels(one).items()]
        ports = {port["name"]: port["containerPort"] for port in container(match)["ports"]}
        for port in spec["ports"]:
            assert ports[port["targetPort"]] == port["port"]
            if service["metadata"]["name"] in ("decant-router", "decant"):
                assert port["appProtocol"] == "kubernetes.io/h2c"
