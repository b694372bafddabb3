import platform
from importlib.metadata import version

import grpc

from decant.protos import worker_pb2
from decant.runtime.errors import Internal, QueueFull
from decant.runtime.protocol import PROTOCOL
from decant.runtime.telemetry.metrics import (
    GATEWAY_NAMES,
    EngineMetrics,
    ProcessMetrics,
    PromptSource,
    Registry,
    RequestMetrics,
)
from decant.runtime.telemetry.usage_metrics import MAX_ADAPTERS, MAX_TENANTS, OTHER_ADAPTERS, OTHER_TENANTS


def names(registry: Registry) -> set[str]:
    return {line.split()[2] for line in registry.text().decode().splitlines() if line.startswith("# TYPE")}


def test_gateways_find_vllms_names_where_they_are_asked_for() -> None:
    registry = Registry(process=False, gateway_names=True)
    metrics = RequestMetrics(registry)
    model = metrics.of("m")
    metrics.queues.waiting.labels("m").set(3)
    metrics.cache_usage.labels("m").set(0.25)
    model.generated.inc(7)
    model.ttft.observe(0.07)
    lines = registry.text().decode().splitlines()
    for line in (
        'vllm:num_requests_waiting{model_name="m"} 3.0',
        'vllm:kv_cache_usage_perc{model_name="m"} 0.25',
        'vllm:generation_tokens_total{model_name="m"} 7.0',
        'vllm:time_to_first_token_seconds_bucket{le="0.08",model_name="m"} 1.0',
        'vllm:time_to_first_token_seconds_count{model_name="m"} 1.0',
        "# TYPE vllm:num_requests_waiting gauge",
        'decant_requests_waiting{model="m"} 3.0',
    ):
        assert line in lines
    worker = Registry(process=False, gateway_names=True)
    EngineMetrics(worker, ())
    found = (
        {f"decant_{name}" for name in GATEWAY_NAMES}
        - (names(registry) | names(worker))
        - {f"decant_{name}" for name in GATEWAY_NAMES if f"decant_{name}_total" in names(registry) | names(worker)}
    )
    assert not found, "each has a metric of the router or of a worker"
    assert not any("vllm:" in line for line in Registry(process=False).text().decode().splitlines())


def test_router_metrics_have_standard_names() -> None:
    registry = Registry(process=False)
    ProcessMetrics(registry)
    model = RequestMetrics(registry).of("m")
    model.ttft.observe(0.07)
    model.prompt[PromptSource.CACHED].inc(16)
    text = registry.text().decode()
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
        assert f"decant_{name}_seconds" in names(registry)
    for phase in ("queue", "prefill", "decode"):
        assert f"decant_request_{phase}_time_seconds" in names(registry)
    assert 'decant_time_to_first_token_seconds_bucket{le="0.08",model="m"} 1.0' in text
    assert 'decant_time_to_first_token_seconds_bucket{le="0.06",model="m"} 0.0' in text
    assert 'decant_prompt_tokens_total{model="m",source="local_cache_hit"} 16.0' in text
    assert {"decant_requests_running", "decant_requests_waiting", "decant_errors_total"} <= names(registry)


def test_worker_metrics_have_standard_names_and_every_cause_from_the_start() -> None:
    registry = Registry(process=False)
    causes = [name.removeprefix("CAUSE_").lower() for name in worker_pb2.Cause.DESCRIPTOR.values_by_name]
    engine = EngineMetrics(registry, causes)
    engine.handoff_failures["corrupt"].inc()
    engine.handoff_bytes.observe(70_000)
    text = registry.text().decode()
    assert 'decant_handoff_failures_total{cause="corrupt"} 1.0' in text
    assert 'decant_handoff_failures_total{cause="peer_lost"} 0.0' in text
    assert 'decant_handoff_bytes_bucket{le="262144.0"} 1.0' in text
    assert {"decant_kv_cache_usage_ratio", "decant_preemptions_total", "decant_handoff_seconds"} <= names(registry)
    assert "decant_generation_tokens_total" in names(registry)


def test_two_processes_in_one_test_do_not_share() -> None:
    one, other = Registry(process=False), Registry(process=False)
    ProcessMetrics(one).count_error(Internal())
    ProcessMetrics(other).count_error(QueueFull(1, retry_after=1))
    assert 'reason="internal"' in one.text().decode()
    assert 'reason="internal"' not in other.text().decode()
    assert 'code="RESOURCE_EXHAUSTED",fault_owner="capacity",reason="queue_full"' in other.text().decode()


def test_a_metric_has_no_series_of_creation_times() -> None:
    registry = Registry(process=False)
    RequestMetrics(registry).of("m").ttft.observe(1)
    ProcessMetrics(registry).count_error(Internal())
    assert "_created" not in registry.text().decode()


def test_every_process_names_its_build() -> None:
    registry = Registry(process=False)
    ProcessMetrics(registry)
    (line,) = [line for line in registry.text().decode().splitlines() if line.startswith("decant_build_info{")]
    assert f'version="{version("decant-llm")}"' in line
    assert f'protocol="{PROTOCOL}"' in line
    assert f'python="{platform.python_version()}"' in line
    assert f'grpc="{grpc.__version__}"' in line
    assert line.endswith(" 1.0")


def test_a_process_tells_its_own_memory() -> None:
    assert "process_resident_memory_bytes" in names(Registry())


def test_tenants_beyond_the_limit_share_one_label() -> None:
    registry = Registry(process=False)
    names = [f"t{number}" for number in range(MAX_TENANTS + 5)]
    tenants = RequestMetrics(registry, names).tenants
    for name in (*names, "unknown"):
        tenants.count_request(name, prompt_tokens=3)
        tenants.count_tokens(name, 2)
        tenants.count_refusal(name)
    text = registry.text().decode()
    for name, value in (("t0", 1), (f"t{MAX_TENANTS - 1}", 1), (OTHER_TENANTS, 6)):
        assert f'decant_tenant_requests_total{{tenant="{name}"}} {value}.0' in text
        assert f'decant_tenant_requests_refused_total{{tenant="{name}"}} {value}.0' in text
        assert f'decant_tenant_prompt_tokens_total{{tenant="{name}"}} {3 * value}.0' in text
        assert f'decant_tenant_generation_tokens_total{{tenant="{name}"}} {2 * value}.0' in text
    assert text.count("decant_tenant_requests_total{") == MAX_TENANTS + 1


def test_adapters_beyond_the_limit_share_one_label_and_requests_without_one_have_none() -> None:
    registry = Registry(process=False)
    adapters = RequestMetrics(registry).adapters
    for name in ("", *(f"a{number}" for number in range(MAX_ADAPTERS + 5)), "a0"):
        adapters.count_request(name, prompt_tokens=3)
        adapters.count_tokens(name, 2)
    text = registry.text().decode()
    for name, value in (("a0", 2), (f"a{MAX_ADAPTERS - 1}", 1), (OTHER_ADAPTERS, 5)):
        assert f'decant_adapter_requests_total{{adapter="{name}"}} {value}.0' in text
        assert f'decant_adapter_prompt_tokens_total{{adapter="{name}"}} {3 * value}.0' in text
        assert f'decant_adapter_generation_tokens_total{{adapter="{name}"}} {2 * value}.0' in text
    assert text.count("decant_adapter_requests_total{") == MAX_ADAPTERS + 1


def test_gauges_are_set_before_each_scrape() -> None:
    registry = Registry(process=False)
    waiting = RequestMetrics(registry).queues.waiting.labels("m")
    counts = iter([3, 5])
    registry.before_scrape(lambda: waiting.set(next(counts)))
    assert 'decant_requests_waiting{model="m"} 3.0' in registry.text().decode()
    assert 'decant_requests_waiting{model="m"} 5.0' in registry.text().decode()
