"""A few inputs for each decoder, and those that were once neither accepted nor refused. More: ``make fuzz``."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest
import structlog

from decant.protos.kserve import grpc_service_pb2 as kserve
from tests.fuzz.__main__ import Fault, fuzz
from tests.fuzz.targets import KSERVE, Target, targets

INPUTS = 40
DEEP = 100_000
YARN = b'{"max_position_embeddings": 8, "rope_scaling": {"type": "yarn", "factor": %s}}'


def kserve_request(parameters: bytes) -> bytes:
    request = kserve.ModelInferRequest()
    request.CopyFrom(KSERVE[0])
    request.raw_input_contents[1] = len(parameters).to_bytes(4, "little") + parameters
    return request.SerializeToString()


ONCE_FAULTS = [
    ("config.json", b"[" * DEEP),
    ("config.json", b'{"a":' * DEEP),
    ("config.json", b'{"text_config": 1}'),
    ("config.json", YARN % b"1e308"),
    ("config.json", YARN % (b"1" + b"0" * 400)),
    ("config.json", b'{"vocab_size": 1' + b"0" * 400 + b"}"),
    ("tokenizer_config.json", b"[" * DEEP),
    ("tokenizer.json", b'{"added_tokens": [{"id": 1e999, "content": "<|end|>"}]}'),
    ("safetensors header", DEEP.to_bytes(8, "little") + b"[" * DEEP),
    ("safetensors header", (35).to_bytes(8, "little") + b'{"a": {"data_offsets": [0, 1e999]}}'),
    ("config.json of weights", b"[" * DEEP),
    ("credentials", b"a = " + b"[" * DEEP),
    ("KServe's request", kserve_request(b'{"temperature": 1' + b"0" * 400 + b"}")),
    ("KServe's request", kserve_request(b'{"top_p": "-1' + b"0" * 400 + b'"}')),
    ("KServe's request", kserve_request(b'{"stop": {"a": 1}}')),
    ("settings", b"a = " + b"{a=" * DEEP),
]


@pytest.fixture(scope="module")
def known() -> Iterator[dict[str, Target]]:
    with targets() as made:
        yield {target.name: target for target in made}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


def test_every_decoder_accepts_or_refuses_mutated_inputs(known: dict[str, Target]) -> None:
    for target in known.values():
        outcome = fuzz(target, INPUTS, random.Random(target.name))
        assert outcome.accepted, f"{target.name} refuses even its seeds"


@pytest.mark.parametrize(("name", "data"), ONCE_FAULTS, ids=[str(at) for at in range(len(ONCE_FAULTS))])
def test_an_input_that_was_once_a_fault_is_refused(known: dict[str, Target], name: str, data: bytes) -> None:
    target = known[name]
    with pytest.raises(target.refusals):
        target.decode(data)


def test_a_fault_is_noticed() -> None:
    def decode(data: bytes) -> None:
        assert data == b"seed"

    with pytest.raises(Fault, match="AssertionError"):
        fuzz(Target("fragile", [b"seed"], decode, (ValueError,)), 50, random.Random(1))
