"""`Score` and `Embed` as clients see them: what is validated, computed and counted."""

from __future__ import annotations

import re
from typing import Any

import pytest

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.router.limits import MAX_CONTINUATIONS, MAX_EMBED_INPUTS
from decant.runtime.error_details import Reason
from decant.runtime.errors import InvalidArgument
from decant.runtime.packed import unpack
from tests.router.factories import tiny
from tests.router.service_harness import Harness, error_of_call, harness

PROMPT = "def f(x):"


def ids_of(text: str) -> list[int]:
    return tiny().tokenizer.encode(text).ids


def texts(*each: str) -> list[pb.Continuation]:
    return [pb.Continuation(text=text) for text in each]


def ids(*each: int) -> pb.TokenIds:
    return pb.TokenIds(ids=each)


async def test_a_score_is_the_sum_over_the_continuation_alone() -> None:
    async with harness() as s:
        continuations = [*texts("\n    return x"), pb.Continuation(token_ids=ids(5, 6))]
        response = await s.stub.Score(pb.ScoreRequest(prompt=PROMPT, continuations=continuations, priority=3))
        prompt, whole = ids_of(PROMPT), ids_of(PROMPT + "\n    return x")
        first, second = response.scores
        assert [token.token_id for token in first.tokens] == whole[len(prompt) :]
        assert [token.logprob for token in first.tokens] == [-at for at in range(len(prompt), len(whole))]
        assert first.logprob == -sum(range(len(prompt), len(whole)))
        assert [(token.token_id, token.token) for token in second.tokens] == [
            (id, tiny().token_table.bytes_of(id).decode()) for id in (5, 6)
        ]
        tokens = len(whole) + 2
        assert response.usage == pb.Usage(prompt_tokens=tokens, total_tokens=tokens, cached_prompt_tokens=2)
        (batch,) = s.requests.prompts.batches
        assert (batch.tokens, batch.priority, batch.shares_first) == (tokens, 3, True)
        assert [unpack(request.prompt).tolist() for request in batch.requests] == [whole, [*prompt, 5, 6]]
        assert {request.prompt_logprobs_from for request in batch.requests} == {len(prompt)}
        assert s.count("requests_total") is None


async def test_embeddings_have_the_order_of_the_inputs_and_the_options_of_the_call() -> None:
    async with harness() as s:
        inputs = [pb.EmbedInput(text="x = 1"), pb.EmbedInput(token_ids=ids(5, 6, 7))]
        options: dict[str, Any] = {"pooling": pb.EmbedRequest.POOLING_MEAN, "dimensions": 2, "normalize": False}
        response = await s.stub.Embed(pb.EmbedRequest(inputs=inputs, **options))
        count = len(ids_of("x = 1"))
        assert [list(each.values) for each in response.embeddings] == [[count, 0.5], [3, 0.5]]
        assert [each.prompt_tokens for each in response.embeddings] == [count, 3]
        (batch,) = s.requests.prompts.batches
        expected = wire.Embedding(pooling=wire.Embedding.POOLING_MEAN, dimensions=2, normalize=False)
        assert [request.embedding for request in batch.requests] == [expected] * 2
        plain = await s.stub.Embed(pb.EmbedRequest(inputs=inputs[:1]))
        assert plain.model == "tiny-python"
        default = wire.Embedding(pooling=wire.Embedding.POOLING_LAST, normalize=True)
        assert s.requests.prompts.batches[1].requests[0].embedding == default


SCORES: dict[str, tuple[dict[str, Any], str]] = {
    "no continuation": ({"continuations": []}, f"continuations: 1 to {MAX_CONTINUATIONS}, got 0"),
    "too many": (
        {"continuations": texts("x") * 300},
        f"continuations: at most {MAX_CONTINUATIONS} continuations, got 300",
    ),
    "one without input": (
        {"continuations": [*texts("x"), pb.Continuation()]},
        r"continuations\[1\]: a text or token_ids, got none",
    ),
    "an empty text": ({"continuations": texts("")}, r"continuations\[0\].text: at least 1 character, got 0"),
    "no ids": (
        {"continuations": [pb.Continuation(token_ids=ids())]},
        r"continuations\[0\].token_ids.ids: at least 1 token, got 0",
    ),
    "an unknown id": (
        {"continuations": [pb.Continuation(token_ids=ids(1 << 20))]},
        r"continuations\[0\].token_ids.ids: token ids below \d+, got 1048576",
    ),
    "a text that joins the prompt's last token": (
        {"prompt": "def f(x):\n    re", "continuations": texts("turn x")},
        r"continuations\[0\].text: a text after which the prompt has the same tokens .+, got turn x",
    ),
    "a text after ids": (
        {"prompt": None, "token_ids": ids(5), "continuations": texts("x")},
        r"continuations\[0\].text: unset where the prompt is token_ids: send token_ids, got x",
    ),
    "an empty prompt": ({"prompt": ""}, "prompt: at least 1 token, got 0"),
    "too many alternatives": ({"logprobs": 21}, "logprobs: at most 20 alternatives, got 21"),
    "a priority": ({"priority": 1001}, "priority: -1000 to 1000, got 1001"),
    "too long": (
        {"continuations": [pb.Continuation(token_ids=ids(*[5] * 100))]},
        r"continuations\[0\].token_ids.ids: at most 63 tokens, .+ of 64, got \d+",
    ),
}


@pytest.mark.parametrize("case", SCORES)
async def test_a_score_that_breaks_a_limit_is_refused_by_field_limit_and_value(case: str) -> None:
    fields, message = SCORES[case]
    request = {"prompt": PROMPT, "continuations": texts("\n    return x"), **fields}
    async with harness() as s:
        s.requests.context_length = 64
        error = await error_of_call(s.stub.Score(pb.ScoreRequest(**request)))
        assert isinstance(error, InvalidArgument)
        assert_matches(message, error)
        assert not s.requests.prompts.batches
        assert outcome_count(s, "Score", error.label) == 1


EMBEDS: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({"inputs": []}, f"inputs: 1 to {MAX_EMBED_INPUTS}, got 0"),
    "an empty text": ({"inputs": [pb.EmbedInput(text="")]}, r"inputs\[0\].text: at least 1 token, got 0"),
    "one without input": ({"inputs": [pb.EmbedInput()]}, r"inputs\[0\]: a text or token_ids, got none"),
    "a pooling": ({"pooling": 9}, "pooling: a value of its enum, got 9"),
    "no dimensions": ({"dimensions": 0}, "dimensions: from 1, got 0"),
    "too long": (
        {"inputs": [pb.EmbedInput(text="x"), pb.EmbedInput(token_ids=ids(*[5] * 64))]},
        r"inputs\[1\].token_ids.ids: at most 63 tokens, .+ of 64, got 64",
    ),
}


@pytest.mark.parametrize("case", EMBEDS)
async def test_an_embedding_that_breaks_a_limit_is_refused_by_field_limit_and_value(case: str) -> None:
    fields, message = EMBEDS[case]
    async with harness() as s:
        s.requests.context_length = 64
        error = await error_of_call(s.stub.Embed(pb.EmbedRequest(**{"inputs": [pb.EmbedInput(text="x")], **fields})))
        assert isinstance(error, InvalidArgument)
        assert_matches(message, error)
        assert not s.requests.prompts.batches


async def test_a_text_without_tokens_has_the_reason_of_an_empty_prompt() -> None:
    async with harness() as s:
        error = await error_of_call(s.stub.Embed(pb.EmbedRequest(inputs=[pb.EmbedInput()])))
        assert error.reason is Reason.EMPTY_PROMPT


async def test_calls_are_counted_by_outcome_with_their_tokens() -> None:
    async with harness() as s:
        await s.stub.Score(pb.ScoreRequest(prompt=PROMPT, continuations=texts("\n    return x")))
        await s.stub.Embed(pb.EmbedRequest(inputs=[pb.EmbedInput(token_ids=ids(5, 6, 7))]))
        assert (outcome_count(s, "Score", "ok"), outcome_count(s, "Embed", "ok")) == (1, 1)
        tokens = len(ids_of(PROMPT + "\n    return x")) + 3
        labels = {"model": "tiny-python"}
        prompt = [
            s.registry.collectors.get_sample_value("decant_prompt_tokens_total", {**labels, "source": source})
            for source in ("local_cache_hit", "local_compute")
        ]
        assert prompt == [4, tokens - 4]


def assert_matches(message: str, error: InvalidArgument) -> None:
    assert re.fullmatch(message, f"{error.field}: {error.limit}, got {error.value}"), str(error)


def outcome_count(s: Harness, method: str, outcome: str) -> float | None:
    labels = {"model": "tiny-python", "method": method, "outcome": outcome}
    return s.registry.collectors.get_sample_value("decant_prompt_calls_total", labels)
