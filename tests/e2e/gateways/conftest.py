"""One deployment behind both gateways, for all tests of this folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from openai import OpenAI

from decant import models
from tests.e2e.checkpoints import small_with
from tests.e2e.deployment import SMALL_KV, Deployment, Process, deployment
from tests.e2e.gateways.openai_calls import ADAPTER, KEY, LIMITED, MODEL, client_of
from tests.engine import peft_adapters

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{# calls: <tool_call> arguments </tool_call> #}"
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}def {% endif %}"
)
SMG, OWN = "smg", "decant"
TENANTS = f"""
[tenants.acme]
tokens = ["{hashlib.sha256(KEY.encode()).hexdigest()}"]

[tenants.umbrella]
tokens = ["{hashlib.sha256(LIMITED.encode()).hexdigest()}"]
max_in_flight = 1
"""


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models") / MODEL
    return small_with(folder, "tokenizer_config.json", chat_template=TEMPLATE)


@pytest.fixture(scope="package")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    adapter = peft_adapters.for_model(tmp_path_factory.mktemp("adapters") / ADAPTER, models.path(), seed=1)
    often_waiting = ("--stream-keepalive-seconds", "0.02")  # the gateway skips its responses that are no chunk
    # A run of the router that is killed stays for the lease; it has to end before the drain of its worker does.
    worker = (*SMALL_KV, "--adapters", f"{ADAPTER}={adapter}", "--lease-ms", "30000")
    with deployment(decode=3, model=str(model), router=often_waiting, worker=worker) as made:
        yield made


@pytest.fixture(scope="package")
def url_of_smg(running: Deployment) -> Iterator[str]:
    arguments = ("--host", "127.0.0.1", "--port", "0", "--drain-seconds", "10", "--routers", running.address)
    with Process("command.up.openai_gateway", *arguments, common=()) as gateway:
        gateway.until("readiness", state="ready")
        yield f"http://{gateway.until('serving')['address']}"


@pytest.fixture(scope="package")
def routers_with_tenants(
    running: Deployment, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Process]]:
    """Two more routers of the deployment, which need keys."""
    file: Path = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    file.write_text(TENANTS)
    arguments = ("--redis-url", running.redis.url, "--port", "0", "--models", str(model), "--credentials", str(file))
    with ExitStack() as stack:
        routers = [
            stack.enter_context(Process("router", *arguments, "--handoff-min-tokens", "0", "--id", f"keys-{number}"))
            for number in range(2)
        ]
        for router in routers:
            router.until("readiness", state="ready")
        yield routers


@pytest.fixture(scope="package")
def own_url(routers_with_tenants: list[Process]) -> Iterator[str]:
    addresses = ",".join(router.until("serving")["address"] for router in routers_with_tenants)
    with Process("gateway", "--port", "0", "--address", addresses, "--drain-seconds", "10") as gateway:
        gateway.until("readiness", state="ready")
        yield f"http://{gateway.until('serving')['address']}"


@pytest.fixture(params=[OWN, SMG])
def url(request: pytest.FixtureRequest) -> str:
    """Each test of it runs through both gateways."""
    url: str = request.getfixturevalue({OWN: "own_url", SMG: "url_of_smg"}[request.param])
    return url


@pytest.fixture
def client(url: str) -> OpenAI:
    return client_of(url)


@pytest.fixture
def own(own_url: str) -> OpenAI:
    return client_of(own_url)
