from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from decant import models


def refuse(*_: object, **__: object) -> NoReturn:
    raise AssertionError("a test of the model opened a connection")


@pytest.fixture(autouse=True, scope="package")
def no_network() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        yield


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def model(no_network: None) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(models.path(), dtype=torch.float32)
    loaded.eval()
    return loaded


@pytest.fixture(scope="package")
def tokenizer(no_network: None) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(models.path())


@pytest.fixture(scope="package")
def figures() -> dict[str, Any]:
    measured: dict[str, Any] = json.loads((models.path() / "figures.json").read_text())
    return measured
