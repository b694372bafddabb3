from __future__ import annotations

from decant.protos import inference_pb2 as pb
from decant.router.limits import check_count
from decant.router.text.prompt import chat_tokens, checked_ids, text_tokens, text_written
from decant.router.text.served_model import MAX_INLINE_LENGTH, ServedModel
from decant.runtime.connections.channel import Deadline
from decant.runtime.errors import InvalidArgument


async def tokenize(
    request: pb.TokenizeRequest, model: ServedModel, context_length: int, deadline: Deadline
) -> pb.TokenizeResponse:
    match request.WhichOneof("input"):
        case "messages":
            if request.HasField("add_special_tokens"):
                limit = "unset with messages, whose template brings its own"
                raise InvalidArgument("add_special_tokens", limit, request.add_special_tokens)
            parse = request.parse_special_tokens
            ids = await chat_tokens(request.messages, model, context_length, deadline, parse_special=parse)
        case "text":
            special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            written = text_written(request)
            ids = await text_tokens(
                "text", request.text, model, context_length, deadline, special=special, written=written
            )
        case _:
            raise InvalidArgument("text", "a text", "none")

    def texts() -> list[str]:
        return [model.token_table.bytes_of(id).decode(errors="replace") for id in ids]

    tokens: list[str] = []
    if request.return_tokens:
        tokens = texts() if len(ids) <= MAX_INLINE_LENGTH else await model.texts.run(4 * len(ids), deadline, texts)
    return pb.TokenizeResponse(count=len(ids), token_ids=ids, tokens=tokens)


async def detokenize(
    request: pb.DetokenizeRequest, model: ServedModel, context_length: int, deadline: Deadline
) -> pb.DetokenizeResponse:
    check_count("token_ids", len(request.token_ids), context_length, "tokens, as the model's context")
    ids = await checked_ids("token_ids", request.token_ids, model, deadline)
    skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
    return pb.DetokenizeResponse(text=await model.decode(ids, skip_special_tokens=skip, deadline=deadline))
