"""Every decoder of bytes from outside: of clients, workers, Redis, the model's files and operators."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from google.protobuf.message import DecodeError

from decant import models as trained
from decant.engine.checkpoint import weight_files
from decant.engine.errors import AdapterRefused, ModelRefused
from decant.handoff import codec
from decant.handoff.errors import HandoffFailed
from decant.handoff.packing import TransferLayout, Unpacker, pack
from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.protos.kserve import grpc_service_pb2 as kserve
from decant.protos.state_pb2 import RequestRecord, WorkerRegistration
from decant.protos.vllm import vllm_engine_pb2 as vllm
from decant.router.api import auth
from decant.router.api.prompt_requests import check_embed, check_score, embed_prompts, score_prompts
from decant.router.api.tokenizing import detokenize, tokenize
from decant.router.api.validation import check_known, validate
from decant.router.kserve import requests as kserve_requests
from decant.router.limits import check_size
from decant.router.settings import RouterSettings
from decant.router.text.served_model import Models
from decant.router.vllm.metadata import call_metadata
from decant.router.vllm.requests import generate_request
from decant.runtime.connections.channel import Deadline
from decant.runtime.error_details import DETAILS_KEY, from_trailers, to_status
from decant.runtime.errors import InvalidArgument, ServiceError, from_detail
from decant.runtime.gguf.folder import small_files
from decant.runtime.gguf.reader import GgufUnreadable
from decant.runtime.model_files import ModelUnreadable, find
from decant.runtime.packed import pack as pack_numbers
from decant.runtime.serving.admin import AdminServer
from decant.runtime.serving.health import Readiness
from decant.runtime.settings import InvalidSettings
from decant.runtime.settings_sources import load
from decant.runtime.telemetry import tracing
from decant.runtime.telemetry.metrics import Registry
from decant.state import journal, stored
from decant.state.directory import Workers
from decant.state.errors import UnreadableRequest
from decant.state.ids import Incarnation, RequestKey
from decant.state.keys import Ttls
from decant.worker.wire_codec import RequestRejected, to_requests
from tests import gguf_files
from tests.fuzz.mutation import Mutate, mutate_header, mutate_json, mutate_toml, of_bytes
from tests.handoff.test_packing import RUN, SMALL, blocks_of
from tests.router.factories import context_length, tiny
from tests.router.test_worker_messages import follow, unconnected_session

CONTEXT = 512
MESSAGE = wire.Run(request="r", epoch=1, attempt=1)
GENERATE = (
    pb.GenerateRequest(
        request_id="r", prompt="def f(x):", sampling=pb.SamplingParams(temperature=0.5, top_k=4, seed=1)
    ),
    pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1, 2, 3]),
        stopping=pb.StoppingParams(max_tokens=5, stop=["\n"], stop_token_ids=[3]),
        response=pb.ResponseOptions(logprobs=2, echo=True),
    ),
    pb.GenerateRequest(sampling=pb.SamplingParams(logit_bias={7: 1.5}), prompt="é" * 50, priority=3, user="someone"),
)
VLLM_HEAD = b"x-llm-d-inference-objective=batch\nx-llm-d-inference-ttl=1.5s\nx-llm-d-inference-fairness-id=a"
VLLM = vllm.GenerateRequest(
    request_id="r",
    text="def f(x):",
    sampling_params=vllm.SamplingParams(temperature=0.5, top_p=0.9, repetition_penalty=1.0, max_tokens=5, stop=["x"]),
)
ENGINE = wire.EngineRequest(
    model="m",
    prompt=pack_numbers([1, 2, 3]),
    outputs=[wire.OutputPrefix(output=0, tokens=pack_numbers([4]))],
    sampling=wire.Sampling(temperature=1, top_p=0.5, repetition_penalty=1, logit_bias={7: 1.5}, seed=3),
    stopping=wire.Stopping(max_tokens=5, stop_token_ids=[2]),
)
KSERVE = [
    kserve.ModelInferRequest(
        model_name="m",
        inputs=[
            kserve.ModelInferRequest.InferInputTensor(name=name, datatype="BYTES", shape=[1]),
            kserve.ModelInferRequest.InferInputTensor(name="sampling_parameters", datatype="BYTES", shape=[1]),
        ],
        raw_input_contents=[len(text).to_bytes(4, "little") + text for text in (b"def f(x):", parameters)],
    )
    for name, parameters in (
        ("text_input", b'{"temperature": 0.5, "stop": ["x"], "seed": 1, "n": 2}'),
        ("text_input", b'{"temperature": "0.5", "stop_token_ids": [1, 2], "max_tokens": 5}'),
    )
]
SCORE = pb.ScoreRequest(prompt="def f", continuations=[pb.Continuation(text="(x):")], logprobs=1)
EMBED = pb.EmbedRequest(inputs=[pb.EmbedInput(text="def f")], pooling=pb.EmbedRequest.POOLING_MEAN, dimensions=4)
WORKER_MESSAGES = (
    wire.WorkerMessage(
        frame=wire.Frame(slots=pack_numbers([0]), positions=pack_numbers([3]), tokens=pack_numbers([7]))
    ),
    wire.WorkerMessage(decode_started=wire.DecodeStarted(run=MESSAGE, slots=[wire.Slot(slot=0)])),
    wire.WorkerMessage(
        ended=wire.Ended(run=MESSAGE, end=wire.OutputEnd(reason=wire.OutputEnd.REASON_STOP, end_position=4))
    ),
    wire.WorkerMessage(failed=wire.Failed(run=MESSAGE, failure=wire.Failure(cause=wire.CAUSE_ENGINE, detail="x"))),
    wire.WorkerMessage(scheduled=wire.Scheduled(run=MESSAGE)),
    wire.WorkerMessage(heartbeat=wire.Heartbeat()),
)
CREDENTIALS = f'[tenants.a]\ntokens = ["{"0" * 64}"]\nmodels = ["tiny-python"]\nmax_in_flight = 3\n'
SETTINGS = "models = ['m']\nport = 0\nqueue_limit = 8\nresult_memory = '1M'\nhost = '127.0.0.1'\n"


MORE_FILES = {
    "config.json": b'{"text_config": {"vocab_size": 9, "max_position_embeddings": 64, "eos_token_id": [1], '
    b'"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}}',
    "generation_config.json": b'{"eos_token_id": 1, "do_sample": true, "temperature": 0.5, "top_p": 0.9, "top_k": 3}',
    "tokenizer_config.json": b'{"eos_token": {"content": "<e>"}, "split_special_tokens": true, "added_tokens_decoder": '
    b'{"3": {"content": "<e>", "lstrip": true}, "4": {"content": "<x>"}}, "extra_special_tokens": ["<y>"]}',
    "tokenizer.json": b'{"model": {"vocab": [["a", 0.5], ["<e>", 1.0]], "merges": ["a b"]}, "added_tokens": []}',
}


@dataclass(frozen=True)
class Target:
    name: str
    seeds: Sequence[bytes]
    decode: Callable[[bytes], Any]
    refusals: tuple[type[Exception], ...]
    """What a decoder may raise: an error that its caller expects."""
    mutate: Mutate | None = None

    @property
    def mutator(self) -> Mutate:
        return self.mutate or of_bytes(self.seeds)


def _serialized(*messages: Any) -> list[bytes]:
    return [message.SerializeToString() for message in messages]


def _clients(loop: asyncio.AbstractEventLoop) -> Iterator[Target]:
    models = Models([tiny()])
    yield from _generation_requests(loop, models)
    yield from _prompt_requests(loop)
    yield from _texts_of_clients(models)


REFUSALS = (DecodeError, ServiceError)


def _generation_requests(loop: asyncio.AbstractEventLoop, models: Models) -> Iterator[Target]:
    """Of each API that generates."""

    def check(request: pb.GenerateRequest) -> None:
        loop.run_until_complete(validate(request, models, context_length(CONTEXT), Deadline(), "a"))

    def generate(data: bytes) -> None:
        request = pb.GenerateRequest.FromString(data)
        if not request.HasField("messages"):  # they are rendered in a process of its own
            check(request)

    def kserve_request(data: bytes) -> None:
        with kserve_requests.kserve_field_names():
            own, _ = kserve_requests.generate_request(kserve.ModelInferRequest.FromString(data))
            own.model = ""
            check(own)

    def vllm_request(data: bytes) -> None:
        head, _, body = data.partition(b"\0|\0")
        pairs = [pair.partition("=") for pair in head.decode("latin-1").split("\n")]
        described = call_metadata([(name, value) for name, _, value in pairs], {"batch": -1})
        check(generate_request(vllm.GenerateRequest.FromString(body), described))

    yield Target("vLLM's request", [VLLM_HEAD + b"\0|\0" + VLLM.SerializeToString()], vllm_request, REFUSALS)
    yield Target("KServe's request", _serialized(*KSERVE), kserve_request, REFUSALS)
    yield Target("GenerateRequest", _serialized(*GENERATE), generate, REFUSALS)


def _prompt_requests(loop: asyncio.AbstractEventLoop) -> Iterator[Target]:
    def decoder(kind: Any, read: Any, check: Callable[[Any], object] = lambda _: None) -> Callable[[bytes], None]:
        def decode(data: bytes) -> None:
            request = kind.FromString(data)
            check_size(request)
            check_known(request)
            if kind is pb.TokenizeRequest and request.HasField("messages"):
                return
            check(request)
            loop.run_until_complete(read(request, tiny(), CONTEXT, Deadline()))

        return decode

    text, ids = pb.TokenizeRequest(text="def f"), pb.DetokenizeRequest(token_ids=[1, 2, 300])
    score = decoder(pb.ScoreRequest, score_prompts, check_score)
    embed = decoder(pb.EmbedRequest, embed_prompts, check_embed)
    yield Target("ScoreRequest", _serialized(SCORE), score, REFUSALS)
    yield Target("EmbedRequest", _serialized(EMBED), embed, REFUSALS)
    yield Target("TokenizeRequest", _serialized(text), decoder(pb.TokenizeRequest, tokenize), REFUSALS)
    yield Target("DetokenizeRequest", _serialized(ids), decoder(pb.DetokenizeRequest, detokenize), REFUSALS)


def _texts_of_clients(models: Models) -> Iterator[Target]:
    callers = auth.Credentials({hashlib.sha256(b"secret").hexdigest(): auth.Tenant("a", models)})

    def metadata(data: bytes) -> None:
        text = data.decode("latin-1")
        tracing.parent_of([("traceparent", text), ("x", data)])
        callers.tenant_of([("authorization", text)])

    def answer_of_the_admin_port(data: bytes) -> None:
        AdminServer(Readiness(), Registry(process=False))._answer(
            data.split(b"\r\n", 1)[0].decode("latin-1"), is_local=True
        )

    yield Target(
        "metadata", [b"Bearer secret", b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"], metadata, (ServiceError,)
    )
    yield Target(
        "admin port", [b"GET /metrics HTTP/1.1\r\n\r\n", b"HEAD /alive?x=1 HTTP/1.0"], answer_of_the_admin_port, ()
    )


def _routers() -> Iterator[Target]:
    """Errors that a client of this library decodes."""
    detail = InvalidArgument("prompt", "at least 1 byte", 0).detail

    def status(data: bytes) -> None:
        from_detail(from_trailers(detail.code, "message", [(DETAILS_KEY, data)]))

    yield Target("status details", [to_status(detail).SerializeToString()], status, ())


def _workers(loop: asyncio.AbstractEventLoop) -> Iterator[Target]:
    layout = TransferLayout(layout_hash=1, block_size=16, block_bytes=SMALL)

    def engine_request(data: bytes) -> None:
        to_requests("r", wire.EngineRequest.FromString(data), model="m")

    def fetched(data: bytes) -> None:
        received = codec.decode(data)
        Unpacker(RUN, layout).unpack(received.response.kv_chunk, received.data)

    async def handle(message: wire.WorkerMessage) -> None:
        async with unconnected_session() as session:
            follow(session, "r", 0, logprobs=1)
            session.on_message(message)

    yield Target("EngineRequest", _serialized(ENGINE), engine_request, (DecodeError, RequestRejected))
    chunks = list(pack(RUN, layout, blocks_of(layout, 0, 3)))
    yield Target("FetchResponse", chunks, fetched, (DecodeError, HandoffFailed))
    decode = lambda data: loop.run_until_complete(handle(wire.WorkerMessage.FromString(data)))  # noqa: E731
    # ValueError: malformed arrays, for which the session breaks.
    yield Target("WorkerMessage", _serialized(*WORKER_MESSAGES), decode, (DecodeError, ValueError))


def _store() -> Iterator[Target]:
    record = RequestRecord(model="m").SerializeToString()
    payload = GENERATE[0].SerializeToString()
    directory = Workers(cast(Any, None), "workers", WorkerRegistration, Ttls())
    registration = WorkerRegistration(peer=wire.Peer(id="w", incarnation=3), address="a:1", model="m")

    def request(data: bytes) -> None:
        parts = data.split(b"\0|\0")
        parts += [b""] * (4 - len(parts))
        length = len(parts[2]) // journal.ENTRY_BYTES
        owner = parts[3]
        snapshot = [1, 1, 1, owner, 0, parts[0], parts[1], 5, length, parts[2]]
        stored.parse(RequestKey("t", "r"), cast(Any, snapshot))

    def entry(data: bytes) -> None:
        directory._parsed(data, data, 0)

    whole = b"\0|\0".join([record, payload, journal.pack([journal.Entry(0, 5)]), str(Incarnation("r", 9)).encode()])
    yield Target("stored request", [whole], request, (UnreadableRequest,))
    yield Target("directory", _serialized(registration), entry, ())


def _gguf(folder: Path) -> bytes:
    content = gguf_files.small(kind=gguf_files.Type.Q4_0).write(folder / "seed.gguf").read_bytes()
    (folder / "seed.gguf").unlink()
    return content


def _files(folder: Path) -> Iterator[Target]:
    """Files of a model and of an operator."""
    source = trained.path()
    names = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
    small = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": [{"id": 1, "content": "<e>"}]}
    seeds = {name: (source / name).read_bytes() for name in names if (source / name).is_file()}
    seeds["tokenizer.json"] = json.dumps(small).encode()
    seeds.setdefault("generation_config.json", b'{"eos_token_id": [1], "do_sample": true, "temperature": 0.5}')

    def model_file(name: str) -> Callable[[bytes], None]:
        def decode(data: bytes) -> None:
            for other, content in seeds.items():
                (folder / other).write_bytes(data if other == name else content)
            find(str(folder))

        return decode

    def weights(data: bytes) -> None:
        (folder / "config.json").write_bytes(seeds["config.json"])
        (folder / "model.safetensors").write_bytes(data)
        weight_files.check(folder)

    def gguf(data: bytes) -> None:
        file = folder / "model.gguf"
        file.write_bytes(data)
        small_files(file)
        file.unlink()

    def weights_config(data: bytes) -> None:
        (folder / "config.json").write_bytes(data)
        (folder / "model.safetensors").write_bytes(_weights())
        weight_files.check(folder)

    def toml(read: Callable[[Path], object]) -> Callable[[bytes], None]:
        def decode(data: bytes) -> None:
            file = folder / "file.toml"
            file.write_bytes(data)
            read(file)

        return decode

    for name in seeds:
        yield Target(name, [seeds[name], MORE_FILES[name]], model_file(name), (ModelUnreadable,), mutate_json)
    with_weights = [seeds["config.json"], MORE_FILES["config.json"]]
    yield Target("config.json of weights", with_weights, weights_config, (ModelRefused,), mutate_json)
    yield Target("gguf", [_gguf(folder)], gguf, (GgufUnreadable,))
    yield Target("safetensors header", [_weights()], weights, (ModelRefused,), mutate_header)
    models = Models([tiny()])
    yield Target(
        "credentials",
        [CREDENTIALS.encode()],
        toml(lambda file: auth.load(file, models)),
        (InvalidSettings,),
        mutate_toml,
    )
    settings = toml(lambda file: load(RouterSettings, ["--config", str(file)], {}))
    yield Target("settings", [SETTINGS.encode()], settings, (InvalidSettings,), mutate_toml)


def _adapters(folder: Path) -> Iterator[Target]:
    """Files of an adapter, which a worker also reads while it serves."""
    from decant.engine.checkpoint import adapter
    from tests.engine.peft_adapters import CONFIG, WEIGHTS, plain

    plain(folder, {"model.layers.0.self_attn.q_proj": (4, 4)}, rank=2)
    seeds = {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}

    def read(name: str) -> Callable[[bytes], None]:
        def decode(data: bytes) -> None:
            for other, content in seeds.items():
                (folder / other).write_bytes(data if other == name else content)
            adapter.read("a", folder)

        return decode

    yield Target(CONFIG, [seeds[CONFIG]], read(CONFIG), (AdapterRefused,), mutate_json)
    yield Target(WEIGHTS, [seeds[WEIGHTS]], read(WEIGHTS), (AdapterRefused,), mutate_header)
    yield Target("bytes of an adapter", [seeds[WEIGHTS]], read(WEIGHTS), (AdapterRefused,))


def _weights() -> bytes:
    head = json.dumps({"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})
    return len(head).to_bytes(8, "little") + head.encode() + bytes(8)


@contextmanager
def targets() -> Iterator[list[Target]]:
    with TemporaryDirectory() as folder, asyncio.Runner() as runner:
        loop = runner.get_loop()
        yield [
            *_clients(loop),
            *_routers(),
            *_workers(loop),
            *_store(),
            *_files(Path(folder)),
            *_adapters(Path(folder, "adapter")),
        ]
