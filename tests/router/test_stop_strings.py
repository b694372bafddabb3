from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.router.request.output import Finish, Output
from decant.router.request.token_stream import TokenStream
from decant.router.request.valid_request import ValidRequest
from decant.router.text.output_text import new_output_text
from decant.router.text.stop_strings import StopStrings
from decant.router.workers.subscription import WriteError
from decant.runtime.errors import InvalidArgument
from decant.state.journal import Entry
from decant.state.store import Store
from tests.router.factories import begin_writing, tiny, valid, write
from tests.router.fake_script import answer
from tests.router.fake_worker import fleet
from tests.router.harness import core, make_request, until, until_ended
from tests.router.response_reader import Reader, settle

EOS = 1
P, D = ("p", wire.ROLE_PREFILL), ("d", wire.ROLE_DECODE)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=4)


# ---------------------------------------------------------------------------------------- the search


def plain_end(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    for end in range(len(text) + 1):
        if here := [stop for stop in stops if text[:end].endswith(stop)]:
            return end, max(here, key=len)
    return None


def plain_held(text: str, stops: Sequence[str]) -> int:
    begun = [size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
    return max(begun, default=0)


@pytest.mark.slow
@given(st.text("ab\n", max_size=30), STOPS, st.data())
@settings(max_examples=400, deadline=None)
def test_the_first_complete_stop_string_is_found_in_any_pieces(text, stops, data):
    search, held, done, found = StopStrings(stops), "", 0, None
    while done < len(text) and found is None:
        piece = text[done : done + data.draw(st.integers(1, 6))]
        match = search.find(held + piece, len(held))
        if match is not None:
            found = (done - len(held) + match.end, match.stop)
            continue
        done += len(piece)
        count = search.held_length(held + piece)
        assert count == search.held_length(text[:done]) == plain_held(text[:done], stops)
        held = text[done - count : done]
    assert found == plain_end(text, stops)


@pytest.mark.slow
@given(st.text("ab", max_size=12), st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4)))
@settings(max_examples=300, deadline=None)
def test_text_before_min_tokens_completes_no_stop_string_but_may_begin_one(early, late, stops):
    search = StopStrings(stops)
    count = search.held_length(early)
    assert count == plain_held(early, stops)
    match = search.find(early[len(early) - count :] + late, count)
    ends = [
        end
        for end in range(len(early) + 1, len(early + late) + 1)
        if any((early + late)[:end].endswith(each) for each in stops)
    ]
    assert (match is not None) == bool(ends)
    if match is not None:
        assert len(early) - count + match.end == ends[0]


# --------------------------------------------------------------------- one output, written and read


class Plain:
    def __init__(self, request: ValidRequest, stops: Sequence[str]) -> None:
        self.request = request
        self.stops = stops

    def certain(self, tokens: list[int]) -> str:
        stopping, wanted = self.request.engine_request.stopping, self.request.output_options
        detokenizer = tiny().token_table.detokenizer(skip_special_tokens=wanted.skip_special_tokens)
        kept = tokens[-1] not in {EOS, *stopping.stop_token_ids}
        kept |= tokens[-1] in stopping.stop_token_ids and wanted.include_stop
        text = detokenizer.add(tokens if kept else tokens[:-1])
        return text + detokenizer.flush() if self.is_last(tokens) else text

    def is_last(self, tokens: list[int]) -> bool:
        stopping = self.request.engine_request.stopping
        return len(tokens) == stopping.max_tokens or tokens[-1] in {EOS, *stopping.stop_token_ids}

    def texts(self, tokens: list[int]) -> tuple[list[str], str | None]:
        shown: list[str] = []
        seen = 0
        for count in range(1, len(tokens) + 1):
            text = self.certain(tokens[:count])
            if count >= self.request.engine_request.stopping.min_tokens:
                for end in range(seen + 1, len(text) + 1):
                    if here := [stop for stop in self.stops if text[:end].endswith(stop)]:
                        stop = max(here, key=len)
                        return [
                            *shown,
                            text[: end if self.request.output_options.include_stop else end - len(stop)],
                        ], stop
            seen = len(text)
            held = 0 if self.is_last(tokens[:count]) else plain_held(text, self.stops)
            shown.append(text[: len(text) - held])
        return shown, None


BEGIN, END = 0, EOS
NAMES = {BEGIN: "<|begin|>", END: "<|end|>"}


async def stopped(tokens: list[int], **fields: Any) -> tuple[str, Finish | None]:
    """Text and end of an output of ``tokens``, each written and read alone; None: no stop string."""
    request = await valid(**fields)
    stream = TokenStream(request)
    writer, reader = begin_writing(stream), Reader(stream)
    task = asyncio.create_task(reader.read())
    for place, token in enumerate(tokens):
        writer.write(request.prompt_tokens + place, token)
        await settle()
    stop = writer.finish
    write(stream, end=stop or Finish(pb.FINISH_REASON_LENGTH))
    await task
    return reader.text, stop


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(("token", "ignore_eos"), [(BEGIN, False), (BEGIN, True), (END, True)])
async def test_a_stop_string_that_is_a_special_token_ends_the_output(token, skip, ignore_eos):
    tokens = [*await tiny().encode("x = 1", special=False), token, 7, 7]
    response = pb.ResponseOptions(skip_special_tokens=skip)
    for include in (False, True):
        stopping = pb.StoppingParams(stop=[NAMES[token]], ignore_eos=ignore_eos, include_stop_in_output=include)
        text, end = await stopped(tokens, stopping=stopping, response=response)
        assert text == "x = 1" + (NAMES[token] if include else "")
        assert end == Finish(pb.FINISH_REASON_STOP, stop_string=NAMES[token])


async def test_a_special_token_completes_no_stop_string_before_min_tokens():
    tokens = [*await tiny().encode("x", special=False), BEGIN, *await tiny().encode("y", special=False), BEGIN]
    stopping = pb.StoppingParams(stop=["<|begin|>"], min_tokens=3)
    text, end = await stopped(tokens, stopping=stopping)
    assert (text, end) == ("xy", Finish(pb.FINISH_REASON_STOP, stop_string="<|begin|>"))


async def test_the_text_of_a_special_token_in_other_tokens_ends_the_output_too():
    tokens = await tiny().encode("a<|begin|>", special=False)
    assert BEGIN not in tokens
    text, end = await stopped([*tokens, 7], stopping=pb.StoppingParams(stop=["<|begin|>"]))
    assert (text, end) == ("a", Finish(pb.FINISH_REASON_STOP, stop_string="<|begin|>"))


@pytest.mark.parametrize("stop", ["x<|begin|>", "<|end|>\n", "<|begin|><|end|>"])
async def test_a_stop_string_that_skipped_tokens_keep_from_matching_is_refused(stop):
    with pytest.raises(InvalidArgument, match="skip_special_tokens false") as refused:
        await valid(stopping=pb.StoppingParams(stop=["y", stop]))
    assert refused.value.field == "stopping.stop[1]"
    assert stop in str(refused.value) or repr(stop) in str(refused.value)
    await valid(stopping=pb.StoppingParams(stop=[stop]), response=pb.ResponseOptions(skip_special_tokens=False))


PIECES = ["def f", "(x)", ":\n", "    ", "return", "é", "日本", "👨‍👩‍👧", "😀", "\n\n"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=8)


async def stopping_case(data: st.DataObject) -> tuple[dict[str, Any], list[int], list[str]]:
    text = "".join(data.draw(TEXTS))
    tokens = await tiny().encode(text, special=False) + data.draw(st.lists(st.integers(2, 4095), max_size=3))
    tokens = [token for token in tokens if token != EOS] or [5]
    pieces = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 6)).map(lambda at: text[at[0] : sum(at)])
    stops = data.draw(st.lists(pieces.filter(bool) | st.sampled_from(["\n", "x", "zz", "\ufffd", "日"]), max_size=3))
    min_tokens = data.draw(st.integers(0, len(tokens)))
    ends_at = len(tokens) if data.draw(st.booleans()) else len(tokens) + 9
    if ends_at > len(tokens) and data.draw(st.booleans()):
        tokens.append(EOS)
    stopping = pb.StoppingParams(
        max_tokens=ends_at,
        min_tokens=min_tokens,
        stop=stops or ["\n"],
        include_stop_in_output=data.draw(st.booleans()),
        stop_token_ids=tokens[-1:] if data.draw(st.booleans()) and tokens[-1] not in tokens[:-1] else [],
    )
    response = pb.ResponseOptions(token_ids=True, skip_special_tokens=data.draw(st.booleans()))
    return {"stopping": stopping, "response": response, "request_id": "r"}, tokens, stops or ["\n"]


@pytest.mark.slow
@given(st.data())
@settings(max_examples=250, deadline=None)
async def test_output_text_equals_a_search_in_the_whole_text_however_tokens_are_divided(data):
    fields, tokens, stops = await stopping_case(data)
    request = await valid(**fields)
    shown, stop = Plain(request, stops).texts(tokens)
    stream = TokenStream(request)
    writer = begin_writing(stream)
    for place, token in enumerate(tokens):
        assert writer.write(request.prompt_tokens + place, token) is None
    assert stream.outputs[0].tokens == tokens[: len(shown)]
    assert writer.finish == (None if stop is None else Finish(pb.FINISH_REASON_STOP, stop_string=stop))
    text, done = new_output_text(tiny(), request.output_options, request.engine_request.stopping), 0
    joined = ""
    while done < len(stream.outputs[0].tokens):
        more = stream.outputs[0].tokens[done : done + data.draw(st.integers(1, 5))]
        joined += text.add(more)
        done += len(more)
        assert joined == shown[done - 1]
    assert text.stop == stop


@pytest.mark.slow
@given(st.data())
@settings(max_examples=60, deadline=None)
async def test_a_stream_stops_at_the_same_place_however_it_is_divided_and_resumed(data):
    fields, tokens, stops = await stopping_case(data)
    request = await valid(**fields)
    shown, stop = Plain(request, stops).texts(tokens)
    stream = TokenStream(request)
    writer = begin_writing(stream)
    first = Reader(stream)
    task = asyncio.create_task(first.read())
    for place, token in enumerate(tokens):
        writer.write(request.prompt_tokens + place, token)
        await settle()
    write(stream, end=Finish(pb.FINISH_REASON_LENGTH))
    await task
    whole = shown[-1]
    if stop is None and not Plain(request, stops).is_last(tokens):
        assert first.text.startswith(whole)  # a worker ended it early: what was held back is shown
        return
    assert first.text == whole
    assert first.messages[-1].seq == first.messages[-1].usage.completion_tokens == len(shown)
    assert (first.messages[-1].finished.stop_string or None) == stop
    after = data.draw(st.integers(0, len(shown)))
    later = Reader(stream, after_seq=after)
    await later.read()
    assert (shown[after - 1] if after else "") + later.text == whole


async def test_only_text_that_may_begin_a_stop_string_is_held_back():
    request = await valid(stopping=pb.StoppingParams(stop=["\nclass"]))
    text = new_output_text(tiny(), request.output_options, request.engine_request.stopping)
    parts = [text.add([token]) for token in await tiny().encode("def f(x):\n    return\ncl", special=False)]
    assert "".join(parts) == "def f(x):\n    return"
    assert text.stop is None


async def test_a_character_that_the_end_completes_can_complete_a_stop_string():
    smile = await tiny().encode("x😀", special=False)
    stopping = pb.StoppingParams(stop=["😀"], max_tokens=len(smile))
    request = await valid(stopping=stopping)
    stream = TokenStream(request)
    writer = begin_writing(stream)
    for place, token in enumerate(smile):
        writer.write(request.prompt_tokens + place, token)
    assert writer.finish == Finish(pb.FINISH_REASON_STOP, stop_string="😀")
    stream.end = writer.finish
    reader = Reader(stream)
    await reader.read()
    assert reader.text == "x"


# ------------------------------------------------------------------------------------------------- the output


async def new_stoppable() -> tuple[TokenStream, list[int]]:
    request = await valid(stopping=pb.StoppingParams(stop=["return"]))
    return TokenStream(request), await tiny().encode("x\nreturn x + 1", special=False)


@dataclass
class StopRecorder:
    writer: Output
    stops: list[Finish | None] = field(default_factory=list)

    def on_stop_string(self, output: Output) -> None:
        assert output is self.writer
        self.stops.append(self.writer.finish)


@pytest.mark.rule(
    "nothing-after-a-stop-string",
    "router/request/output.py:Output.write",
    "router/request/output.py:Output._search_stop_string",
)
async def test_tokens_after_a_stop_are_dropped_and_not_requested_again():
    stream, tokens = await new_stoppable()
    writer = begin_writing(stream)
    recorder = StopRecorder(writer)
    stream.begin_attempt(recorder)
    base = writer.position
    for place, token in enumerate(tokens):
        assert writer.write(base + place, token) is None
    assert recorder.stops == [Finish(pb.FINISH_REASON_STOP, stop_string="return")]
    written = list(writer.tokens)
    assert writer.write(base + len(tokens) + 5, 7) is None  # no gap: nothing is wanted any more
    assert writer.write(base, tokens[0] + 1) is WriteError.CONFLICT
    assert writer.tokens == written
    assert len(written) < len(tokens)


async def test_an_output_of_an_adopted_stream_continues_its_text():
    stream, tokens = await new_stoppable()
    writer = begin_writing(stream)
    base = writer.position
    for place, token in enumerate(tokens):
        writer.write(base + place, token)
    written = writer.tokens
    for known in range(len(written) + 1):
        adopted = TokenStream(stream.request, [Entry(0, token) for token in written[:known]])
        again = begin_writing(adopted)
        assert (again.finish is not None) == (known == len(written))
        for place, token in enumerate(tokens[known:], known):
            again.write(base + place, token)
        assert (again.tokens, again.finish) == (written, writer.finish)


# ---------------------------------------------------------------------------------- what workers are sent


class AfterSome:
    def __init__(self, count: int) -> None:
        self.stop: str | None = None
        self._left = count

    def add(self, tokens: Sequence[int]) -> str:
        self._left -= len(tokens)
        self.stop = None if self._left > 0 else "stop"
        return ""

    def flush(self) -> str:
        return ""


def stops_after(count: int, **more: Any) -> ValidRequest:
    return make_request(new_answer=lambda: AfterSome(count), **more)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("pools", [(P, D), (D,)])
async def test_a_stop_string_cancels_the_run_at_its_worker(store: Store, count: int, pools: Any) -> None:
    async with fleet(*pools) as workers, core(store, workers) as stopping_case:
        for worker in workers:
            worker.script.pause_at = count  # they would go on
        stream = await stopping_case.answer(stops_after(count, max_tokens=9))
        assert stream.end == Finish(pb.FINISH_REASON_STOP, stop_string="stop")
        assert stream.outputs[0].tokens == answer([1, 2, 3], count)
        decoder = workers[-1]
        await until(lambda: decoder.cancels or (count == 1 and not decoder.starts))
        for worker in workers:
            for cancel in worker.cancels:
                assert (cancel.reason, cancel.end_position) == (wire.Cancel.REASON_STOP_STRING, 3 + count)
            worker.go.set()


@pytest.mark.parametrize("count", [1, 3])
async def test_a_stop_at_the_very_last_token_is_a_stop(store: Store, count: int) -> None:
    async with fleet(P, D) as workers, core(store, workers) as stopping_case:
        stream = await stopping_case.answer(stops_after(count, max_tokens=count))
        assert stream.end == Finish(pb.FINISH_REASON_STOP, stop_string="stop")
        assert stream.outputs[0].tokens == answer([1, 2, 3], count)


async def test_a_stop_survives_a_lost_worker(store: Store) -> None:
    async with fleet(P, D) as (prefill, decode), core(store, [prefill, decode]) as stopping_case:
        decode.script.fails_at = [2]
        stream = await stopping_case.answer(stops_after(4, max_tokens=9))
        assert stream.end == Finish(pb.FINISH_REASON_STOP, stop_string="stop")
        assert stream.outputs[0].tokens == answer([1, 2, 3], 4)
        assert stream.trace.attempts == 2


async def test_frames_after_a_stop_are_ignored(store: Store) -> None:
    async with fleet(D) as (decode,), core(store, [decode]) as stopping_case:
        stream = await until_ended(await stopping_case.requests.begin(stops_after(2, max_tokens=200)))
        await until(lambda: decode.cancels)
        assert stream.outputs[0].tokens == answer([1, 2, 3], 2)
