"""Validation of GuidedDecoding."""

from __future__ import annotations

from decant.engine.errors import InvalidRequest
from decant.engine.guides.guide import Guide
from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.router.text.served_model import ServedModel
from decant.runtime.connections.channel import Deadline
from decant.runtime.errors import InvalidArgument


async def guide_of(request: pb.GenerateRequest, model: ServedModel, deadline: Deadline) -> wire.Guide | None:
    """Guide of a request, of which the model's workers can compile a grammar.

    Raises InvalidArgument; QueueFull or DeadlineExceeded where it waits for others to be compiled.
    """
    kind = request.guided.WhichOneof("guide")
    if kind is None:
        if request.HasField("guided"):
            raise InvalidArgument("guided", "one of its fields", "none")
        return None
    _check_stopping(request.stopping)
    try:
        guide = Guide.of(kind, getattr(request.guided, kind))
    except InvalidRequest as error:
        raise InvalidArgument(error.field, error.limit, error.value) from None
    if model.guides is None:
        raise InvalidArgument("guided", "unset for this model", kind)
    await model.guides.check(guide, deadline)
    return wire.Guide.FromString(request.guided.SerializeToString())


def _check_stopping(stopping: pb.StoppingParams) -> None:
    if stopping.min_tokens:
        limit = "0 with guided, which says where the output may end"
        raise InvalidArgument("stopping.min_tokens", limit, stopping.min_tokens)
    if stopping.ignore_eos:
        raise InvalidArgument("stopping.ignore_eos", "false with guided, after which the output ends", True)
