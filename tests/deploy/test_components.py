"""What each component is for."""

from __future__ import annotations

import re
from typing import Any

import kubernetes_validate
import pytest
import yaml

from decant.command.up import openai_gateway
from decant.runtime.byte_size import parse_byte_size
from decant.runtime.serving.server import CLEANUP_SECONDS
from decant.state.client import Client
from tests.deploy.rendering import (
    DEPLOY,
    PROCESSES,
    VERSION,
    Manifests,
    Object,
    combined,
    container,
    labels,
    needs_kustomize,
    overlay,
    pod,
)

pytestmark = [needs_kustomize, pytest.mark.slow]

WORKERS = ("prefill-worker", "decode-worker")


def with_redis(*components: str) -> Manifests:
    return combined(("redis-development", *components))


def test_prefill_replaces_pods_in_an_upgrade_and_decode_adds_them_unless_each_needs_a_gpu() -> None:
    def surges(manifests: Manifests) -> dict[str, Any]:
        return {name: manifests.processes[name]["spec"]["strategy"]["rollingUpdate"] for name in PROCESSES}

    in_place, added = {"maxSurge": 0, "maxUnavailable": 1}, {"maxSurge": 1, "maxUnavailable": 0}
    assert surges(with_redis()) == {"prefill-worker": in_place, "decode-worker": added, "router": added}
    assert surges(with_redis("gpu")) == {"prefill-worker": in_place, "decode-worker": in_place, "router": added}


def test_redis_for_development_deletes_nothing_and_its_container_has_memory_beside_its_data() -> None:
    manifests = with_redis()
    redis = container(manifests.deployments["decant-redis"])
    arguments = dict(zip(redis["args"][::2], redis["args"][1::2], strict=True))
    assert arguments["--maxmemory-policy"] == "noeviction"
    limit = parse_byte_size(redis["resources"]["limits"]["memory"])
    assert parse_byte_size(arguments["--maxmemory"]) <= limit * 3 / 4
    assert manifests.settings("router").result_memory is None, "half of maxmemory"


def test_an_external_redis_comes_with_its_password_from_a_secret_alone() -> None:
    manifests = combined(("redis-external",))
    assert "decant-redis" not in manifests.deployments
    for name in PROCESSES:
        assert manifests.settings(name).redis_url.startswith("rediss://decant:secret@")


def test_the_urls_that_the_component_of_an_external_redis_shows_are_accepted() -> None:
    text = (DEPLOY / "components" / "redis-external" / "kustomization.yaml").read_text()
    urls = re.findall(r"url=(\S+)", text)
    assert {url.partition("://")[0] for url in urls} == {"rediss", "redis+sentinel", "redis+cluster"}
    for url in urls:
        Client(url, deadline_s=1.0, max_connections=2)


def test_certificates_come_from_an_authority_of_this_deployment() -> None:
    manifests = with_redis("cert-manager")
    issuers, certificates = manifests.of_kind("Issuer"), manifests.of_kind("Certificate")
    authority, peers = certificates["decant-authority"]["spec"], certificates["decant-peers"]["spec"]
    assert issuers[peers["issuerRef"]["name"]]["spec"]["ca"]["secretName"] == authority["secretName"]
    assert authority["isCA"] is True
    assert "selfSigned" in issuers[authority["issuerRef"]["name"]]["spec"]
    assert peers["secretName"] in manifests.mounted_secrets("router").values()
    assert manifests.settings("router").peer_name in peers["dnsNames"]
    assert {"server auth", "client auth"} <= set(peers["usages"])
    admin = certificates["decant-admin"]["spec"]
    assert admin["dnsNames"] == [manifests.settings(name).admin_name for name in WORKERS[:1]]
    assert not set(admin["dnsNames"]) & set(peers["dnsNames"]), "a peer is no administrator"
    assert all(admin["secretName"] not in manifests.mounted_secrets(name).values() for name in PROCESSES)


def test_clients_get_tls_with_a_certificate_for_the_names_of_the_services_alone() -> None:
    manifests = with_redis("cert-manager", "client-tls")
    spec = manifests.of_kind("Certificate")["decant-clients"]["spec"]
    assert manifests.of_kind("Issuer")[spec["issuerRef"]["name"]]["spec"]["ca"]
    router = manifests.processes["router"]
    services = [one for one in manifests.of_kind("Service").values() if service_pods(manifests, one) == router]
    assert {f"{one['metadata']['name']}.decant.svc" for one in services} < set(spec["dnsNames"])
    assert manifests.settings("router").peer_name not in spec["dnsNames"], "it does not stand for a worker"
    assert "client auth" not in spec["usages"]
    settings = manifests.settings("router")
    assert {
        manifests.mounted_secrets("router")[str(one.parent)] for one in (settings.tls_certificate, settings.tls_key)
    } == {spec["secretName"]}


def test_the_audit_runs_as_an_administrator_within_the_limits_of_a_pod() -> None:
    (job,) = yaml.safe_load_all((DEPLOY / "audit.yaml").read_text())
    kubernetes_validate.validate({**job, "metadata": {**job["metadata"], "name": "x"}}, VERSION, strict=True)
    manifests = with_redis("cert-manager")
    worker = manifests.processes["decode-worker"]
    spec, one = pod(job), container(job)
    assert spec["securityContext"] == pod(worker)["securityContext"]
    assert one["securityContext"] == container(worker)["securityContext"]
    assert one["image"] == container(worker)["image"]
    (secret,) = [volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume]
    assert secret == manifests.of_kind("Certificate")["decant-admin"]["spec"]["secretName"]
    assert labels(job)["app.kubernetes.io/part-of"] == "decant", "the NetworkPolicy lets it reach workers"
    assert f"--server-name={manifests.settings('decode-worker').peer_name}" in one["args"]
    (url,) = [entry["value"] for entry in one["env"] if entry["name"] == "REDIS_URL"]
    assert url == manifests.settings("router").redis_url


def signals(manifests: Manifests, name: str) -> set[str]:
    if scaled := manifests.of_kind("ScaledObject"):
        triggers = scaled[f"decant-{name}"]["spec"]["triggers"]
        return {re.sub(r"[\s{].*", "", one["metadata"]["query"]) + one["name"] for one in triggers}
    metrics = manifests.of_kind("HorizontalPodAutoscaler")[f"decant-{name}"]["spec"]["metrics"]
    return {one[one["type"].lower()]["metric"]["name"] for one in metrics}


@pytest.mark.parametrize("component", ["autoscaling-hpa", "autoscaling-keda"])
def test_the_pools_scale_by_signals_of_their_own_and_slowly_down(component: str) -> None:
    manifests = with_redis(component)
    assert signals(manifests, "prefill-worker").isdisjoint(signals(manifests, "decode-worker"))
    assert signals(manifests, "prefill-worker")
    for name in WORKERS:
        assert "replicas" not in manifests.processes[name]["spec"], "each apply would undo the scaling"
        if component == "autoscaling-hpa":
            spec = manifests.of_kind("HorizontalPodAutoscaler")[f"decant-{name}"]["spec"]
            assert spec["minReplicas"] == 1, "an HPA can't scale to zero"
            behaviour = spec["behavior"]
        else:
            spec = manifests.of_kind("ScaledObject")[f"decant-{name}"]["spec"]
            behaviour = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert spec["scaleTargetRef"]["name"] == manifests.processes[name]["metadata"]["name"]
        down = behaviour["scaleDown"]
        assert down["stabilizationWindowSeconds"] >= 10 * behaviour["scaleUp"]["stabilizationWindowSeconds"]
        assert down["stabilizationWindowSeconds"] >= 300
        (slowly,) = down["policies"]
        grace = pod(manifests.processes[name])["terminationGracePeriodSeconds"]
        assert slowly["value"] == 1
        assert down["stabilizationWindowSeconds"] > grace, "the next decision sees the drained pool"


def test_a_pool_at_zero_is_woken_by_the_queue_of_the_routers_and_requests_wait_for_it() -> None:
    manifests = with_redis("autoscaling-keda")
    for name in WORKERS:
        spec = manifests.of_kind("ScaledObject")[f"decant-{name}"]["spec"]
        assert spec["minReplicaCount"] == 0
        waking = [one["metadata"] for one in spec["triggers"] if "decant_requests_waiting" in str(one)]
        waking += [one["metadata"] for one in spec["triggers"] if "decant_waiting_prompt_seconds" in str(one)]
        assert waking
        for one in waking:
            assert one["activationThreshold"] == "0", "one request is enough"
    startup = container(manifests.processes["decode-worker"])["startupProbe"]
    loads_within = startup["periodSeconds"] * startup["failureThreshold"]
    assert manifests.settings("router").worker_wait_seconds >= loads_within
    assert with_redis().settings("router").worker_wait_seconds == 0


def test_a_pool_whose_load_is_unknown_keeps_its_size() -> None:
    """KEDA takes an empty answer for 0 unless a trigger refuses it, and one such error stops every decrease."""
    for one in with_redis("autoscaling-keda").of_kind("ScaledObject").values():
        triggers = [trigger["metadata"] for trigger in one["spec"]["triggers"]]
        refusing = [trigger["query"] for trigger in triggers if trigger.get("ignoreNullValues") == "false"]
        assert refusing
        for query in refusing:
            assert re.match(r"sum\(decant_(requests|waiting)_\w+\{", query), "routers always report it"


def test_the_adapter_has_the_metrics_that_the_autoscalers_read() -> None:
    rules = yaml.safe_load((DEPLOY / "components" / "autoscaling-hpa" / "prometheus-adapter.yaml").read_text())["rules"]
    served = {kind: " ".join(str(rule) for rule in rules[kind]) for kind in ("custom", "external")}
    for one in with_redis("autoscaling-hpa").of_kind("HorizontalPodAutoscaler").values():
        for metric in one["spec"]["metrics"]:
            kind = {"Pods": "custom", "External": "external"}[metric["type"]]
            assert metric[metric["type"].lower()]["metric"]["name"] in served[kind]


def test_prometheus_scrapes_each_process_and_may_reach_its_port() -> None:
    manifests = with_redis("monitoring")
    spec = manifests.of_kind("PodMonitor")["decant"]["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    for name in PROCESSES:
        assert spec["selector"]["matchLabels"].items() <= labels(manifests.processes[name]).items()
        assert endpoint["port"] in {port["name"] for port in container(manifests.processes[name])["ports"]}
    (rule,) = manifests.of_kind("NetworkPolicy")["decant-monitoring"]["spec"]["ingress"]
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    assert manifests.of_kind("ConfigMap")["decant-dashboard"]["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_a_gpu_goes_to_workers_alone_on_nodes_that_are_kept_for_it() -> None:
    manifests = with_redis("gpu")
    for name in WORKERS:
        assert container(manifests.processes[name])["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert pod(manifests.processes[name])["tolerations"]
    assert "nvidia.com/gpu" not in str(manifests.processes["router"])


def test_rdma_asks_for_its_device_and_says_what_it_opens() -> None:
    manifests = with_redis("rdma")
    for name in WORKERS:
        assert manifests.settings(name).handoff == "nixl"
        assert container(manifests.processes[name])["resources"]["limits"]["rdma/hca"] == "1"
    assert "ports" not in manifests.of_kind("NetworkPolicy")["decant-rdma"]["spec"]["ingress"][0]
    assert "IPC_LOCK" not in str(with_redis().objects)


@pytest.mark.parametrize("kind", ["weights-pvc", "weights-image"])
def test_weights_of_a_volume_are_mounted_where_every_process_reads_them(kind: str) -> None:
    manifests = with_redis(kind)
    for name in PROCESSES:
        (mount,) = [one for one in container(manifests.processes[name])["volumeMounts"] if one["name"] == "weights"]
        assert mount["readOnly"] is True
        settings = manifests.settings(name)
        models = settings.models if name == "router" else (f"{settings.model_id}={settings.model}",)
        assert models == (f"served={mount['mountPath']}",)


def test_the_token_of_the_hub_comes_from_a_secret_and_is_optional() -> None:
    manifests = with_redis("weights-hub")
    for name in PROCESSES:
        (entry,) = [one for one in container(manifests.processes[name])["env"] if one["name"] == "HF_TOKEN"]
        assert entry["valueFrom"]["secretKeyRef"] == {"name": "decant-hub", "key": "token", "optional": True}


def test_the_openai_gateway_calls_the_routers_alone_and_drains_within_its_grace() -> None:
    manifests = with_redis("openai-gateway")
    deployment = manifests.deployments["decant-openai"]
    one, options = container(deployment), openai_gateway._options(container(deployment)["args"])
    assert one["command"][-1] == openai_gateway.__name__
    assert [port["containerPort"] for port in one["ports"]] == [options.port]
    name, port = options.routers.split(".decant.svc:")
    service = manifests.of_kind("Service")[name]
    assert [one["port"] for one in service["spec"]["ports"]] == [int(port)]
    assert labels(service_pods(manifests, service)) == labels(manifests.processes["router"])
    assert "app.kubernetes.io/part-of" not in labels(deployment), "it would reach workers and Redis"
    before = one["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod(deployment)["terminationGracePeriodSeconds"] >= before + options.drain_seconds + CLEANUP_SECONDS


def service_pods(manifests: Manifests, service: Object) -> Object:
    selector = service["spec"]["selector"].items()
    (match,) = [one for one in manifests.deployments.values() if selector <= labels(one).items()]
    return match


def test_a_disruption_budget_covers_each_deployment_of_several_pods_and_they_are_spread() -> None:
    manifests = with_redis("availability", "openai-gateway")
    for name, deployment in manifests.deployments.items():
        if name == "decant-redis":
            continue
        spec = manifests.of_kind("PodDisruptionBudget")[name]["spec"]
        assert spec["selector"]["matchLabels"].items() <= labels(deployment).items()
        assert spec["maxUnavailable"] == 1
        assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
        spread = pod(deployment)["topologySpreadConstraints"]
        assert {one["topologyKey"] for one in spread} == {"topology.kubernetes.io/zone", "kubernetes.io/hostname"}
        for one in spread:
            assert one["labelSelector"]["matchLabels"] == deployment["spec"]["selector"]["matchLabels"]


def test_pods_on_openshift_name_no_user_and_write_to_volumes_alone() -> None:
    manifests = with_redis("openai-gateway", "openshift")
    for deployment in manifests.deployments.values():
        assert pod(deployment)["securityContext"].keys() == {"runAsNonRoot", "seccompProfile"}
    for deployment in manifests.processes.values():
        mounts = {mount["mountPath"] for mount in container(deployment)["volumeMounts"] if not mount.get("readOnly")}
        assert {"/cache", "/tmp"} <= mounts


def test_production_has_two_pools_that_scale_and_a_redis_outside() -> None:
    manifests = overlay("production")
    assert set(manifests.of_kind("ScaledObject")) == {"decant-prefill-worker", "decant-decode-worker"}
    assert "decant-redis" not in manifests.deployments
    assert manifests.processes["router"]["spec"]["replicas"] >= 2


def test_the_demo_fits_the_cluster_of_a_laptop() -> None:
    requests = [container(one)["resources"]["requests"] for one in overlay("cpu-demo").deployments.values()]
    cores = sum(float(one["cpu"].removesuffix("m")) / (1000 if one["cpu"].endswith("m") else 1) for one in requests)
    assert cores <= 3
    assert sum(parse_byte_size(one["memory"]) for one in requests) <= 4 << 30
    assert all(one["spec"]["replicas"] == 1 for one in overlay("cpu-demo").deployments.values())


def test_one_gpu_serves_with_one_worker() -> None:
    manifests = overlay("one-gpu")
    gpus = [
        one["spec"]["replicas"] * int(container(one)["resources"]["limits"].get("nvidia.com/gpu", 0))
        for one in manifests.deployments.values()
    ]
    assert sum(gpus) == 1
