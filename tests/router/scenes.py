"""Models and requests in a line."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import models as trained
from protos import inference_pb2 as pb
from router.models import Models, ServedModel, served
from router.request import ValidRequest
from router.validation import validate
from runtime.channel import Deadline
from runtime.model_files import find


@cache
def tiny() -> ServedModel:
    return served(find(str(trained.path())))


def model(**changes: Any) -> ServedModel:
    """The tiny model, with other limits."""
    return replace(tiny(), **changes)


def window(tokens: int | None) -> Any:
    return lambda _: tokens


async def valid(
    *,
    served: ServedModel | None = None,
    workers_window: int | None = None,
    deadline: Deadline = Deadline(),  # noqa: B008 - it has no state
    **fields: Any,
) -> ValidRequest:
    """A valid request; a prompt of its own unless another input is named."""
    if not {"token_ids", "messages", "prompt"} & fields.keys():
        fields["prompt"] = "def f(x):"
    request = pb.GenerateRequest(**fields)
    return await validate(request, Models([served or tiny()]), window(workers_window), deadline)
