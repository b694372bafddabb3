from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decant.command.errors import CommandFailed
from decant.command.up import plan as up_plan
from decant.command.up import resources
from decant.command.up.checks import check_memory
from decant.command.up.options import UpOptions
from decant.command.up.plan import Plan, make_plan
from decant.engine.kv_layout import HOST_KV_BYTES
from decant.runtime import cgroup, cores, host_memory
from decant.runtime.cores import usable_cores
from decant.runtime.settings import InvalidSettings

MIB = 1 << 20


def plan(environ: dict[str, str] | None = None, redis_url: str = "unix:///r", **options: Any) -> Plan:
    return make_plan(UpOptions(**{"kv_memory": "64M", **options}), redis_url, environ or {"PATH": "/bin"})


def flag(arguments: tuple[str, ...], name: str) -> str:
    return arguments[arguments.index(name) + 1]


@given(st.sets(st.integers(0, 300), min_size=1, max_size=64), st.integers(1, 80))
def test_every_worker_has_cores_and_no_core_idles(cores: set[int], workers: int) -> None:
    divided = resources.divide_cores(sorted(cores), workers)
    assert len(divided) == workers
    assert all(divided)
    given_out = [core for share in divided for core in share]
    if workers <= len(cores):
        assert sorted(given_out) == sorted(cores)  # each core once
        assert max(map(len, divided)) - min(map(len, divided)) <= 1
    else:
        assert set(given_out) == cores
        assert all(len(share) == 1 for share in divided)


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 37), st.integers(1, 64))
def test_caches_and_weights_that_exceed_free_memory_are_refused(available: int, weights: int, workers: int) -> None:
    try:
        each = resources.kv_share(available, weights, workers)
    except CommandFailed:
        code = workers * resources.PROCESS_BYTES
        assert (available - code) * 0.75 < workers * (weights * 1.5 + resources.KV_FLOOR + 1)
    else:
        assert resources.KV_FLOOR <= each <= HOST_KV_BYTES
        assert workers * (each + weights + resources.PROCESS_BYTES) <= available


@pytest.mark.parametrize(
    ("text", "count"), [("512M", 512 * MIB), ("2G", 2048 * MIB), ("1.5g", 1536 * MIB), ("64MiB", 64 * MIB), ("7", 7)]
)
def test_sizes_are_parsed_with_their_units(text: str, count: int) -> None:
    assert resources.parse_size(text) == count


def test_an_invalid_size_is_refused() -> None:
    with pytest.raises(CommandFailed, match="--kv-memory"):
        resources.parse_size("much")


def test_available_memory_is_read_from_this_machine() -> None:
    assert 0 < host_memory.available_memory() < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_available_memory_is_no_more_than_the_control_groups_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "available_memory", lambda: 5 * MIB)
    assert host_memory.available_memory() == 5 * MIB


def test_without_proc_meminfo_half_of_the_installed_memory_is_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(cgroup, "_ROOT", tmp_path)
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert host_memory.available_memory() == installed // 2


def test_weights_are_measured_where_they_are() -> None:
    made = plan()
    model = flag(made.workers[0].arguments, "--model")
    assert resources.weights_size(model) > MIB
    assert resources.weights_size("nobody/has-this") == 0


def test_each_process_by_its_name_its_port_and_its_threads() -> None:
    made = plan(router=2, prefill=1, decode=2, port=6000)
    assert [spec.name for spec in made.workers] == ["prefill-1", "decode-1", "decode-2"]
    assert [spec.module for spec in made.workers] == [
        "decant.prefill_worker",
        "decant.decode_worker",
        "decant.decode_worker",
    ]
    assert [spec.port for spec in made.workers] == [0, 0, 0]
    assert [(spec.name, spec.port) for spec in made.routers] == [("router-1", 6000), ("router-2", 6001)]
    for spec in made.workers:
        assert int(flag(spec.arguments, "--threads")) == len(spec.cores)
        assert flag(spec.arguments, "--host") == "127.0.0.1"
        assert flag(spec.arguments, "--kv-bytes") == str(64 * MIB)
    ids = [flag(spec.arguments, "--id") for spec in (*made.workers, *made.routers)]
    assert len(set(ids)) == 5


def test_free_ports_for_all_routers() -> None:
    assert [spec.port for spec in plan(router=3, port=0).routers] == [0, 0, 0]


def test_smg_is_a_process_without_settings_of_decant() -> None:
    (gateway,) = plan({"PATH": "/bin", "DECANT_LOG_LEVEL": "error"}, openai=8000).gateways
    assert (gateway.name, gateway.port, dict(gateway.environment)) == ("openai", 8000, {"PATH": "/bin"})
    assert flag(gateway.arguments, "--host") == "127.0.0.1"
    assert gateway.arguments[-1] == "--routers", "their addresses are known once they listen"
    assert plan().gateways == ()


def test_a_gateway_has_its_own_settings_and_calls_routers_with_tenants_and_tls() -> None:
    secured = {"DECANT_CREDENTIALS": "/file", "DECANT_TLS_CERTIFICATE": "/file", "DECANT_TLS_KEY": "/key"}
    gateway, smg = plan({"PATH": "/bin"}, gateway=8000, openai=8001).gateways
    assert (gateway.name, gateway.port, smg.name, smg.port) == ("gateway", 8000, "openai", 8001)
    assert gateway.arguments[-1] == "--address", "their addresses are known once they listen"
    own = {"PATH": "/bin", "DECANT_CA": "/ca", "DECANT_MAX_REQUESTS": "5"}
    (gateway,) = plan({**secured, **own}, gateway=8000).gateways
    assert dict(gateway.environment) == own
    with pytest.raises(CommandFailed, match="--gateway: set DECANT_CA"):
        plan(secured, gateway=8000)
    with pytest.raises(CommandFailed, match="DECANT_MAX_REQUESTS: no process has such a variable"):
        plan({"DECANT_MAX_REQUESTS": "5"})


@pytest.mark.parametrize(
    ("name", "more"), [("DECANT_CREDENTIALS", {}), ("DECANT_TLS_CERTIFICATE", {"DECANT_TLS_KEY": "/key"})]
)
def test_smg_is_refused_where_it_could_not_call_the_routers(name: str, more: dict[str, str]) -> None:
    with pytest.raises(CommandFailed, match=f"--openai: unset {name}"):
        plan({"PATH": "/bin", name: "/file", **more}, openai=8000)


def test_names_are_unique_where_others_use_the_same_redis() -> None:
    made = plan()
    shared = make_plan(UpOptions(kv_memory="64M", redis_url="redis://elsewhere"), "redis://elsewhere", {})
    assert flag(made.workers[0].arguments, "--id") == "prefill-1"
    assert str(os.getpid()) in flag(shared.workers[0].arguments, "--id")


def test_spinning_is_switched_off_only_when_there_are_more_threads_than_cores() -> None:
    count = len(usable_cores())
    enough = plan(prefill=1, decode=0)
    many = plan(prefill=count, decode=1)
    assert "GOMP_SPINCOUNT" not in enough.workers[0].environment
    assert {spec.environment["GOMP_SPINCOUNT"] for spec in many.workers} == {"0"}
    assert "GOMP_SPINCOUNT" not in many.routers[0].environment


def test_a_quota_of_cpu_time_limits_the_threads_of_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: list(range(8)))
    monkeypatch.setattr(up_plan, "usable_cores", lambda: list(range(8)))
    for quota, threads in ((None, ["4", "4"]), (5.5, ["3", "2"]), (1.0, ["1", "1"])):
        monkeypatch.setattr(cgroup, "cpu_quota", lambda quota=quota: quota)
        workers = plan().workers
        assert [flag(spec.arguments, "--threads") for spec in workers] == threads
        assert all(bool(spec.cores) == (quota is None) for spec in workers), "a quota pins nothing"
        assert all(("GOMP_SPINCOUNT" in spec.environment) == (quota == 1.0) for spec in workers)


@pytest.mark.parametrize("free", [600, 800, 1024, 1948, 2600])
@pytest.mark.parametrize("prefill", [0, 1])
def test_the_kv_memory_that_up_chooses_passes_its_own_check(
    free: int, prefill: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "available_memory", lambda: free * MIB)
    options = UpOptions(prefill=prefill, decode=1)
    check_memory(options, make_plan(options, "unix:///r", {"PATH": "/bin"}))


def test_each_process_gets_the_variables_that_are_its_own() -> None:
    made = plan(
        {
            "DECANT_QUEUE_LIMIT": "3",
            "DECANT_BLOCK_SIZE": "32",
            "DECANT_LOG_LEVEL": "error",
            "HOME": "/h",
            "DECANT_TOKEN": "s",
        }
    )
    router, worker = made.routers[0].environment, made.workers[0].environment
    assert router == {"DECANT_QUEUE_LIMIT": "3", "DECANT_LOG_LEVEL": "error", "HOME": "/h"}
    assert {name: worker[name] for name in worker if name != "GOMP_SPINCOUNT"} == {
        "DECANT_BLOCK_SIZE": "32",
        "DECANT_LOG_LEVEL": "error",
        "HOME": "/h",
    }


def test_tls_variables_are_those_of_routers_and_peer_variables_are_set_when_a_process_starts() -> None:
    public = {"DECANT_TLS_CERTIFICATE": "/c", "DECANT_TLS_KEY": "/k"}
    peers = {"DECANT_PEER_CA": "/a", "DECANT_PEER_CERTIFICATE": "/b", "DECANT_PEER_KEY": "/d", "DECANT_PEER_NAME": "n"}
    made = plan({**public, **peers})
    assert made.routers[0].environment == public
    assert not [name for name in made.workers[0].environment if name.startswith("DECANT")]
    assert made.peers is not None
    assert made.peers.of_router() == peers
    served = {"DECANT_TLS_CERTIFICATE": "/b", "DECANT_TLS_KEY": "/d", "DECANT_TLS_CLIENT_CA": "/a"}
    assert made.peers.of_worker() == peers | served
    assert plan(public).peers is None
    with pytest.raises(CommandFailed, match="DECANT_PEER_CA: needs DECANT_PEER_CERTIFICATE, DECANT_PEER_KEY"):
        plan({"DECANT_PEER_CA": "/a"})
    administered = {**public, "DECANT_TLS_CLIENT_CA": "/a", "DECANT_ADMIN_NAME": "n"}
    assert plan(administered).routers[0].environment == administered
    with pytest.raises(InvalidSettings, match="DECANT_ADMIN_NAME: needs tls_client_ca"):
        plan({"DECANT_ADMIN_NAME": "n"})


@pytest.mark.parametrize("name", ["DECANT_BLOK_SIZE", "DECANT_ID", "DECANT_PORT", "DECANT_ADVERTISE", "DECANT_THREADS"])
def test_variables_that_no_process_or_not_all_can_have_are_refused(name: str) -> None:
    with pytest.raises(CommandFailed, match=name):
        plan({name: "1"})


def test_a_setting_that_a_process_would_refuse_is_refused_before_it_starts() -> None:
    with pytest.raises(InvalidSettings, match="--dtype"):
        plan(dtype="float8")
    with pytest.raises(InvalidSettings, match="DECANT_BLOCK_SIZE"):
        plan({"DECANT_BLOCK_SIZE": "1000"})


@pytest.mark.parametrize("options", [{"prefill": 0, "decode": 0}, {"port": 65535, "router": 2}])
def test_impossible_deployments_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(CommandFailed):
        plan(**options)


@pytest.mark.slow
def test_a_missing_library_for_certificates_is_one_line_that_says_what_to_install(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
sys.modules["cryptography"] = None
from decant.command.errors import one_line_errors
from decant.command.up import peers
with one_line_errors():
    peers.make(Path({str(tmp_path / "peers")!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert done.stderr.startswith("decant: cryptography: not installed")
    assert done.stderr.endswith("pip install 'decant-llm[router]'\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("host", "reached_at"),
    [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("[::]", "::1"), ("10.1.2.3", "10.1.2.3"), ("h", "h")],
)
def test_commands_reach_routers_on_every_address_over_loopback(host: str, reached_at: str) -> None:
    assert plan(host=host).reached_at == reached_at


@pytest.mark.parametrize(("available", "limit"), [(256, 32), (2048, 128), (1 << 20, 256)])
def test_the_private_redis_has_a_limit_and_never_deletes_live_keys(available: int, limit: int) -> None:
    options = resources.redis_limit(available * MIB)
    assert flag(options, "--maxmemory") == str(limit * MIB)
    assert flag(options, "--maxmemory-policy") == "noeviction"
