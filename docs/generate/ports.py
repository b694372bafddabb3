"""Ports of the processes, from the settings and the descriptors."""

from __future__ import annotations

from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2

from decant.decode_worker.main import DecodeSettings
from decant.gateway.settings import GatewaySettings
from decant.prefill_worker.main import PrefillSettings
from decant.protos import inference_pb2, router_admin_pb2, worker_pb2
from decant.protos.kserve import grpc_service_pb2
from decant.protos.vllm import vllm_engine_pb2
from decant.router.settings import RouterSettings
from decant.runtime.serving import reflection
from docs.generate.markdown import code, head, page, table

INTRO = """\
Each process listens on `--host` (default 127.0.0.1), on one port for gRPC and, if set, one for operators. No other port
is opened, but with `--handoff nixl`, whose library takes ports of its own. Kubernetes' base uses 50051 for routers,
50052 for workers and 9090 for operators, and has a NetworkPolicy for each."""
OTHERS = (health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.V1, reflection.V1ALPHA)


ROLES = "../guides/tenants-and-tls.md#administrators"
_ROUTER = (inference_pb2.DESCRIPTOR, vllm_engine_pb2.DESCRIPTOR, grpc_service_pb2.DESCRIPTOR)


def render() -> str:
    kinds = (
        ("router", RouterSettings, _ROUTER, "clients, gateways"),
        ("prefill worker", PrefillSettings, (worker_pb2.DESCRIPTOR,), "routers, workers, administrators"),
        ("decode worker", DecodeSettings, (worker_pb2.DESCRIPTOR,), "routers, workers, administrators"),
    )
    rows: list[tuple[str, ...]] = [
        (name, code("--port"), code(settings.model_fields["port"].default), f"gRPC: {_services(*files)}", callers)
        for name, settings, files, callers in kinds
    ]
    administration = _services(router_admin_pb2.DESCRIPTOR)
    name = code("--admin-name")
    rows.insert(1, ("", "", "", f"{administration} with {name}, see [administrators]({ROLES})", "`decant requests`"))
    port = code(GatewaySettings.model_fields["port"].default)
    rows.append(("gateway", code("--port"), port, "HTTP, or HTTPS: OpenAI's API", "OpenAI's clients"))
    pages = "HTTP, plaintext: `/alive`, `/ready`, `/metrics`"
    rows += [
        (
            "router",
            code("--admin-port"),
            "unset",
            f"{pages}, `/requests` for the same machine",
            "Prometheus, `decant top`, probes",
        ),
        ("workers", code("--admin-port"), "unset", pages, "Prometheus, `decant top`, probes"),
        (
            "Redis",
            code("--redis-url"),
            code(RouterSettings.model_fields["redis_url"].default),
            "Redis",
            "routers, workers, `decant status`",
        ),
    ]
    columns = ("process", "setting", "default", "serves", "callers")
    also = "Each gRPC port also serves " + ", ".join(map(code, OTHERS)) + "."
    return page([head("Ports", "the settings classes and the descriptors"), INTRO, table(columns, rows), also])


def _services(*files: FileDescriptor) -> str:
    return ", ".join(code(service.full_name) for file in files for service in file.services_by_name.values())
