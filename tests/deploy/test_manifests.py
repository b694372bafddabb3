from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

import decant.decode_worker.main
import decant.prefill_worker.main
from decant.command.app import app
from decant.router.settings import RouterSettings
from decant.runtime.byte_size import parse_byte_size
from decant.runtime.serving.server import CLEANUP_SECONDS
from decant.runtime.settings import PREFIX, Settings
from decant.runtime.settings_sources import load
from tests.deploy.rendering import BASE, ROOT, Object, by_kubectl, plainly, rendered

PROCESSES: Mapping[str, type[Settings]] = {
    "router": RouterSettings,
    "prefill-worker": decant.prefill_worker.main.ROLE.settings,
    "decode-worker": decant.decode_worker.main.ROLE.settings,
}
HEALTH_SERVICES = {"alive", "ready"}
VERSION = "1.32"
CERT_MANAGER = "cert-manager.io/v1"
FIELDS = {
    "Issuer": {"selfSigned", "ca"},
    "Certificate": {
        "isCA", "commonName", "secretName", "dnsNames", "usages", "duration", "renewBefore", "privateKey", "issuerRef",
    },
}  # fmt: skip
"""Fields of cert-manager's objects that the base uses."""

OBJECTS = rendered()


def of_kind(kind: str) -> dict[str, Object]:
    return {one["metadata"]["name"]: one for one in OBJECTS if one["kind"] == kind}


DEPLOYMENTS = of_kind("Deployment")
OURS = {name: DEPLOYMENTS[f"decant-{name}"] for name in PROCESSES}

each_object = pytest.mark.parametrize("one", OBJECTS, ids=lambda one: f"{one['kind']}/{one['metadata']['name']}")
each_pod = pytest.mark.parametrize("name", DEPLOYMENTS)
each_process = pytest.mark.parametrize("name", PROCESSES)


def pod(deployment: Object) -> Object:
    spec: Object = deployment["spec"]["template"]["spec"]
    return spec


def container(deployment: Object) -> Object:
    (only,) = pod(deployment)["containers"]
    return dict(only)


def labels(deployment: Object) -> dict[str, str]:
    found: dict[str, str] = deployment["spec"]["template"]["metadata"]["labels"]
    return found


def environment(name: str) -> dict[str, str]:
    one = container(OURS[name])
    maps = [of_kind("ConfigMap")[source["configMapRef"]["name"]]["data"] for source in one["envFrom"]]
    variables: dict[str, str] = {key: value for data in maps for key, value in data.items()}
    for entry in one["env"]:
        variables[entry["name"]] = _value(entry, one, variables)
    return variables


def _value(entry: Object, one: Object, before: Mapping[str, str]) -> str:
    if "value" in entry:
        return re.sub(r"\$\((\w+)\)", lambda match: before[match[1]], entry["value"])
    source = entry["valueFrom"]
    if "resourceFieldRef" in source:
        section, resource = source["resourceFieldRef"]["resource"].split(".")
        return str(one["resources"][section][resource])
    return {"status.podIP": "10.1.2.3"}[source["fieldRef"]["fieldPath"]]


def settings(name: str) -> Any:
    _, *arguments = container(OURS[name])["args"]
    variables = {key: value for key, value in environment(name).items() if key.startswith(PREFIX)}
    return load(PROCESSES[name], arguments, variables)


def size(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", text).groups()  # type: ignore[union-attr]
    return int(number) << {"Mi": 20, "Gi": 30}[unit]


@each_object
def test_every_object_is_valid(one: Object) -> None:
    if one["apiVersion"] == CERT_MANAGER:
        assert one["spec"].keys() <= FIELDS[one["kind"]]
    else:
        kubernetes_validate.validate(one, VERSION, strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="compares with kubectl, which is not on PATH")
def test_the_plain_renderer_and_kubectl_agree() -> None:
    def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
        return {(one["kind"], one["metadata"]["name"]): one for one in objects}

    assert by_name(by_kubectl(BASE)) == by_name(plainly(BASE))


@each_process
def test_every_variable_and_flag_is_a_setting_that_the_process_accepts(name: str) -> None:
    settings(name)


@each_process
def test_the_container_runs_a_command_that_there_is(name: str) -> None:
    commands = {
        command.name or getattr(command.callback, "__name__", "").replace("_", "-")
        for command in app.registered_commands
    }
    one = container(OURS[name])
    assert one["args"][0] == name
    assert name in commands
    assert "command" not in one, "the image's entrypoint is `decant`"


@each_process
def test_ports_are_those_that_are_served_and_probed(name: str) -> None:
    one, given = container(OURS[name]), settings(name)
    ports = {port["name"]: port["containerPort"] for port in one["ports"]}
    assert ports == {"grpc": given.port, "metrics": given.admin_port}
    assert given.host == "0.0.0.0"
    assert given.advertise == f"10.1.2.3:{given.port}"
    for probe, service in (("startupProbe", "alive"), ("readinessProbe", "ready"), ("livenessProbe", "alive")):
        if given.tls == "none":
            assert one[probe]["grpc"] == {"port": given.port, "service": service}
        else:  # native gRPC probes speak plaintext
            assert one[probe]["httpGet"] == {"port": "metrics", "path": f"/{service}"}
        assert service in HEALTH_SERVICES


def mounted_secrets(name: str) -> dict[str, str]:
    secrets = {one["name"]: one["secret"]["secretName"] for one in pod(OURS[name])["volumes"] if "secret" in one}
    mounts = container(OURS[name])["volumeMounts"]
    return {mount["mountPath"]: secrets[mount["name"]] for mount in mounts if mount["name"] in secrets}


@each_process
def test_processes_authenticate_each_other_with_the_issued_certificate(name: str) -> None:
    given, certificate = settings(name), of_kind("Certificate")["decant-peers"]["spec"]
    assert given.tls == ("none" if name == "router" else "mutual"), "routers have --credentials for their clients"
    files = [given.peer_ca, given.peer_certificate, given.peer_key]
    if name != "router":
        files += [given.tls_client_ca, given.tls_certificate, given.tls_key]
        assert not given.allow_unauthenticated_peers
    assert [file.name for file in files[:3]] == ["ca.crt", "tls.crt", "tls.key"]
    assert [file.name for file in files[3:]] in ([], ["ca.crt", "tls.crt", "tls.key"])
    assert {mounted_secrets(name)[str(file.parent)] for file in files} == {certificate["secretName"]}
    assert given.peer_name in certificate["dnsNames"]
    assert {"server auth", "client auth"} <= set(certificate["usages"])


def test_certificates_come_from_an_authority_of_this_deployment() -> None:
    issuers, made = of_kind("Issuer"), of_kind("Certificate")
    authority = made["decant-authority"]["spec"]
    assert (
        issuers[made["decant-peers"]["spec"]["issuerRef"]["name"]]["spec"]["ca"]["secretName"]
        == authority["secretName"]
    )
    assert authority["isCA"] is True
    assert "selfSigned" in issuers[authority["issuerRef"]["name"]]["spec"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="renders an overlay with kubectl, which is not on PATH")
def test_an_overlay_leaves_cert_manager_out_as_documented(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
    (patch,) = [block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "$patch: delete" in block]
    shutil.copytree(BASE, tmp_path / "base")
    (tmp_path / "mine").mkdir()
    head = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [../base]\n"
    (tmp_path / "mine" / "kustomization.yaml").write_text(head + patch)
    kinds = {one["kind"] for one in by_kubectl(tmp_path / "mine")}
    assert "Deployment" in kinds
    assert not kinds & FIELDS.keys()


@each_process
def test_the_grace_period_covers_deregistration_drain_and_shutdown(name: str) -> None:
    before = container(OURS[name])["lifecycle"]["preStop"]["sleep"]["seconds"]
    grace = pod(OURS[name])["terminationGracePeriodSeconds"]
    assert before >= 10
    assert grace >= before + settings(name).drain_seconds + CLEANUP_SECONDS


def test_workers_get_the_threads_and_memory_of_their_settings() -> None:
    for name in ("prefill-worker", "decode-worker"):
        given, limits = settings(name), container(OURS[name])["resources"]["limits"]
        assert given.threads == int(limits["cpu"])
        assert given.kv_bytes <= size(limits["memory"]) // 2


def test_redis_deletes_nothing_by_itself_and_its_container_has_memory_beside_its_data() -> None:
    redis = container(DEPLOYMENTS["decant-redis"])
    arguments = dict(zip(redis["args"][::2], redis["args"][1::2], strict=True))
    assert arguments["--maxmemory-policy"] == "noeviction"
    limit = parse_byte_size(redis["resources"]["limits"]["memory"])
    assert parse_byte_size(arguments["--maxmemory"]) <= limit * 3 / 4
    assert settings("router").result_memory is None, "half of maxmemory"


def test_router_and_workers_serve_the_same_model_over_the_same_redis() -> None:
    router = settings("router")
    for name in ("prefill-worker", "decode-worker"):
        assert settings(name).model in router.models
        assert settings(name).redis_url == router.redis_url
    host, port = re.fullmatch(r"redis://([\w-]+):(\d+)", router.redis_url).groups()  # type: ignore[union-attr]
    assert int(port) in {one["port"] for one in of_kind("Service")[host]["spec"]["ports"]}


@pytest.mark.parametrize("name", of_kind("Service"))
def test_a_service_finds_pods_and_a_port_of_theirs(name: str) -> None:
    spec = of_kind("Service")[name]["spec"]
    (found,) = [one for one in DEPLOYMENTS.values() if spec["selector"].items() <= labels(one).items()]
    ports = {port["name"]: port["containerPort"] for port in container(found)["ports"]}
    for port in spec["ports"]:
        assert ports[port["targetPort"]] == port["port"]


def test_routers_are_reached_as_http2_and_each_by_its_address() -> None:
    services = of_kind("Service")
    assert services["decant-router"]["spec"]["clusterIP"] == "None"
    for name in ("decant-router", "decant"):
        assert services[name]["spec"]["ports"][0]["appProtocol"] == "kubernetes.io/h2c"


@each_process
def test_a_disruption_budget_covers_the_pods(name: str) -> None:
    spec = of_kind("PodDisruptionBudget")[f"decant-{name}"]["spec"]
    assert spec["selector"]["matchLabels"].items() <= labels(OURS[name]).items()
    assert spec["maxUnavailable"] < OURS[name]["spec"]["replicas"]
    assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_prefill_replaces_pods_in_an_upgrade_and_decode_adds_them() -> None:
    surges = {name: OURS[name]["spec"]["strategy"]["rollingUpdate"] for name in PROCESSES}
    assert surges["prefill-worker"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert surges["decode-worker"] == surges["router"] == {"maxSurge": 1, "maxUnavailable": 0}


@each_pod
def test_a_pod_may_do_no_more_than_it_needs(name: str) -> None:
    spec, one = pod(DEPLOYMENTS[name]), container(DEPLOYMENTS[name])
    assert spec["enableServiceLinks"] is False
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert one["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "memory" in one["resources"]["limits"]


@each_pod
def test_selectors_and_mounts_match(name: str) -> None:
    deployment = DEPLOYMENTS[name]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels(deployment).items()
    mounted = {mount["name"] for mount in container(deployment)["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod(deployment)["volumes"]}


def test_workers_have_shared_memory() -> None:
    for name in ("prefill-worker", "decode-worker"):
        (volume,) = [one for one in pod(OURS[name])["volumes"] if one["name"] == "shm"]
        assert volume["emptyDir"]["medium"] == "Memory"
        assert {"name": "shm", "mountPath": "/dev/shm"} in container(OURS[name])["volumeMounts"]


def test_internal_ports_are_reachable_from_the_deployment_alone() -> None:
    spec = of_kind("NetworkPolicy")["decant-inside"]["spec"]
    (rule,) = spec["podSelector"]["matchExpressions"]
    inside = {name for name in DEPLOYMENTS if labels(DEPLOYMENTS[name])[rule["key"]] in rule["values"]}
    assert inside == {"decant-prefill-worker", "decant-decode-worker", "decant-redis"}
    within, metrics = spec["ingress"]
    (peer,) = within["from"]
    for one in DEPLOYMENTS.values():
        assert peer["podSelector"]["matchLabels"].items() <= labels(one).items()
    assert {port["port"] for port in metrics["ports"]} == {settings("decode-worker").admin_port}


class TestContainerfile:
    TEXT = (ROOT / "deploy" / "Containerfile").read_text()

    def test_every_package_is_in_the_image(self) -> None:
        packages = {init.parent.name for init in ROOT.glob("*/__init__.py")} - {"tests", "bench"}
        ignored = (ROOT / ".containerignore").read_text().splitlines()
        for package in packages:
            assert f"\nCOPY {package} {package}\n" in self.TEXT
            assert f"!{package}" in ignored

    def test_the_user_of_the_image_is_the_one_that_pods_run_as(self) -> None:
        stages = [re.findall(r"^USER (\d+):\d+$", stage, re.MULTILINE) for stage in self.TEXT.split("\nFROM ")]
        users = {int(named[-1]) for named in stages if named}
        assert {pod(one)["securityContext"]["runAsUser"] for one in OURS.values()} == users

    def test_the_extras_of_the_image_exist(self) -> None:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = re.findall(r"EXTRAS=([a-z,]+)", self.TEXT)
        assert named == ["worker,cuda", "worker"]
        assert {extra for one in named for extra in one.split(",")} <= extras.keys()

    def test_the_entrypoint_of_the_image_is_the_command(self) -> None:
        assert '\nENTRYPOINT ["decant"]\n' in self.TEXT

    def test_the_tiny_model_is_where_the_manifests_expect_it(self) -> None:
        assert "/opt/decant/models" in self.TEXT
        assert settings("router").models == ("/opt/decant/models/tiny-python",)
        assert (ROOT / "models" / "tiny-python").is_dir()
