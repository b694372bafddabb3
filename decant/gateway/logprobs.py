"""Log-probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from decant.protos import inference_pb2 as pb


def of_chat(tokens: Iterable[pb.TokenLogprob]) -> dict[str, Any]:
    return {
        "content": [{**_entry(token), "top_logprobs": [_entry(top) for top in token.top]} for token in tokens],
        "refusal": None,
    }


def of_completion(tokens: Sequence[pb.TokenLogprob], offset: int, alternatives: int) -> dict[str, Any]:
    """`offset` is where the text of the first token begins. A token is among its own alternatives."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.token)
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [token.logprob if token.HasField("logprob") else None for token in tokens],
        "top_logprobs": [_alternatives(token) for token in tokens] if alternatives else None,
        "text_offset": offsets,
    }


def _entry(token: pb.TokenLogprob | pb.TopLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": token.logprob, "bytes": list(token.raw_bytes)}


def _alternatives(token: pb.TokenLogprob) -> Mapping[str, float] | None:
    if not token.HasField("logprob"):  # the first token of a prompt
        return None
    return {**{top.token: top.logprob for top in token.top}, token.token: token.logprob}
