"""A strictly typed program that tests/decant/test_typing.py checks outside this repository."""

import asyncio
from typing import assert_type

import decant


def ask(client: decant.Client) -> str:
    answer = client.generate("def add(a, b):", max_tokens=40, temperature=0.5, stop=["\n\n"], timeout=60)
    assert_type(answer, decant.Answer)
    assert_type(answer.text, str)
    assert_type(answer.token_ids, tuple[int, ...])
    assert_type(answer.usage.completion_tokens, int)
    assert_type(answer.receipt.ttft_ms, float | None)
    for logprob in answer.logprobs:
        assert_type(logprob.token, str)
        assert_type(logprob.logprob, float)
    client.generate([5, 17, 9])
    client.generate([{"role": "user", "content": "hi"}])
    client.generate(messages=[{"role": "user", "content": "hi"}], add_generation_prompt=True)
    return answer.text


def read(client: decant.Client) -> None:
    with client.stream("x", on_disconnect="detach") as stream:
        assert_type(stream, decant.Stream)
        for delta in stream:
            assert_type(delta, decant.Delta)
            assert_type(delta.text, str)
        if stream.finished is not None:
            assert_type(stream.finished.reason, decant.FinishReason)
    assert_type(client.cancel(stream.request_id), decant.CancelStatus)
    assert_type(client.generation("r").error, decant.ServiceError | None)
    assert_type([model.id for model in client.models()], list[str])
    assert_type(client.server_info().limits.max_outputs, int)
    assert_type(client.tokenize("x").count, int)
    assert_type(client.detokenize([1]), str)


def careful(client: decant.Client) -> None:
    try:
        ask(client)
    except decant.InvalidArgument as error:
        assert_type(error.field, str)
    except (decant.QueueFull, decant.QuotaExceeded) as error:
        assert_type(error.retry_after, float | None)
    except decant.ServiceError as error:
        assert_type(error.reason, decant.Reason)
        assert_type(error.retryable, bool)
        if error.resume is not None:
            assert_type(error.resume.last_seq, int)


def mistaken(client: decant.Client) -> None:
    client.generate("x", max_token=40)  # type: ignore[call-arg]
    client.generate("x", max_tokens="40")  # type: ignore[arg-type]
    client.generate("x", token_ids=[1, 2])  # type: ignore[arg-type]
    client.generate(5)  # type: ignore[arg-type]
    client.stream("x", on_disconnect="stay")  # type: ignore[arg-type]
    decant.Client(50051)  # type: ignore[arg-type]
    print(client.generate("x").txt)  # type: ignore[attr-defined]
    decant.ServiceError("x")  # type: ignore[arg-type]


async def awaiting() -> None:
    async with decant.AsyncClient("localhost", tls=decant.Tls(ca="ca.pem"), token="secret") as client:
        answer = await client.generate(messages=[{"role": "user", "content": "hi"}], max_tokens=3)
        assert_type(answer, decant.Answer)
        async with client.stream("x", seed=1) as stream:
            assert_type(stream, decant.AsyncStream)
            async for delta in stream:
                assert_type(delta.token_ids, tuple[int, ...])


if __name__ == "__main__":
    with decant.Client("localhost") as one:
        careful(one)
    asyncio.run(awaiting())
