import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from decant.protos import inference_pb2 as pb
from decant.protos.inference_pb2_grpc import InferenceServiceStub
from decant.runtime.errors import InvalidArgument, NotFound, from_call
from tests.e2e.client_checks import generate_request
from tests.e2e.deployment import PATIENCE_S, Deployment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

STRANGER = """
import sys, grpc
import inference_pb2 as pb, inference_pb2_grpc as services
with grpc.insecure_channel(sys.argv[1]) as channel:
    stub = services.InferenceServiceStub(channel)
    request = pb.GenerateRequest(prompt="def f(x):", stopping=pb.StoppingParams(max_tokens=12))
    messages = list(stub.GenerateStream(request, timeout=60))
assert messages[-1].usage.completion_tokens > 0 and messages[-1].receipt.e2e_ms > 0
assert not any(name in sys.modules for name in ("protos", "runtime", "decant", "router"))
print("".join(message.delta.text for message in messages))
"""


def test_a_client_generated_from_the_proto_alone_works(pair: Deployment, tmp_path: Path) -> None:
    folder = ROOT / "protos"
    compile_ = [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}"]
    out = [f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}", "inference.proto"]
    subprocess.run([*compile_, *out], check=True)
    run = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{STRANGER}", pair.address]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_reflection_and_health_answer_on_every_process(pair: Deployment) -> None:
    inside = {"Prefill", "Decode", "KvSource", "Admin"}
    served = {pair.address: {"decant.v1.InferenceService"}}
    served |= {worker.address: {f"decant.internal.v1.{name}" for name in inside} for worker in pair.workers}
    for address, names in served.items():
        with grpc.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", "alive", "ready", *names):
                check = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE_S)
                assert check.status == health_pb2.HealthCheckResponse.SERVING
            ask = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            (answer,) = stub.ServerReflectionInfo(ask, timeout=PATIENCE_S)
            assert names <= {service.name for service in answer.list_services_response.service}


async def refusal(stub: InferenceServiceStub, request: pb.GenerateRequest) -> Exception:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(request, timeout=PATIENCE_S)
    return from_call(caught.value)


async def test_refusals_name_field_limit_and_value(stub: InferenceServiceStub) -> None:
    hot = await refusal(stub, pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(temperature=101)))
    assert isinstance(hot, InvalidArgument)
    assert (hot.field, hot.value) == ("sampling.temperature", "101.0")
    assert "100" in hot.limit
    long = await refusal(stub, generate_request([5] * 2049))
    assert isinstance(long, InvalidArgument)
    assert "2048" in long.limit
    assert "2049" in long.value
    many = await refusal(stub, pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(n=129)))
    assert isinstance(many, InvalidArgument)
    assert (many.field, many.limit, many.value) == ("sampling.n", "1 to 128", "129")
    adapter = await refusal(stub, pb.GenerateRequest(prompt="x", lora_name="pirate"))
    assert isinstance(adapter, NotFound)
    assert isinstance(await refusal(stub, pb.GenerateRequest(prompt="x", model="nobody")), NotFound)
    chat = pb.GenerateRequest(messages=pb.Messages(messages=[pb.Message(role="user", content="hello")]))
    untemplated = await refusal(stub, chat)
    assert isinstance(untemplated, InvalidArgument)
    assert "chat template" in untemplated.limit


async def test_every_feature_of_the_api_is_implemented(stub: InferenceServiceStub) -> None:
    info = await stub.GetServerInfo(pb.GetServerInfoRequest())
    assert not info.unimplemented_fields
