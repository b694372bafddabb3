"""Guided sequences of an engine: their end, their errors, and what a grammar's matcher is made from."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import jsonschema
import pytest

from decant.engine.engine import Engine
from decant.engine.errors import InvalidRequest
from decant.engine.fake import FakeDevice
from decant.engine.guides import mask
from decant.engine.guides.compiler import TOO_MANY_STATES, GrammarCompiler
from decant.engine.guides.guide import MAX_CHOICES, Guide, GuideKind
from decant.engine.guides.limits import PARSER_LIMITS
from decant.engine.output import SequenceFinished
from decant.engine.request import FinishReason, Request, SamplingParams, StopParams
from tests.engine.factories import make_engine, make_request
from tests.engine.guides.scripted import ScriptedGrammar
from tests.engine.guides.tiny_tokenizer import END, compiler, text

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ab", "c"]}, "size": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
GUIDES = {
    "schema": Guide(GuideKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    "object": Guide(GuideKind.JSON_OBJECT),
    "regex": Guide(GuideKind.REGEX, "[a-f]{4,9}(x|[0-9]+z)"),
    "grammar": Guide(GuideKind.GRAMMAR, 'start: "a" b+\nb: "x" b "y" | "z"\n'),
    "choice": Guide(GuideKind.CHOICE, choices=("yes", "no", "none")),
}


def device(num_blocks: int = 64) -> FakeDevice:
    return FakeDevice(num_blocks=num_blocks, block_size=4, vocab_size=END + 1, eos_token_ids=frozenset({END}))


def guided(id: str, guide: Guide, *, max_tokens: int = 40, seed: int = 1, tokens: int = 6) -> Request:
    sampling = SamplingParams(temperature=2.0, seed=seed)
    prompt = [(3 * index + seed) % END for index in range(tokens)]
    return make_request(id, prompt, sampling=sampling, stop=StopParams(max_tokens), grammar=compiler().grammar(guide))


def run(engine: Engine, *requests: Request) -> tuple[dict[str, list[int]], dict[str, SequenceFinished]]:
    outputs: dict[str, list[int]] = {request.id: [] for request in requests}
    ends = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        step = engine.step()
        for token in step.tokens:
            outputs[token.id].append(token.token)
        ends.update({end.id: end for end in step.ended})
    engine.check_integrity()
    return outputs, ends


def matches(guide: Guide, output: str) -> bool:
    match guide.kind:
        case GuideKind.JSON_SCHEMA:
            jsonschema.validate(json.loads(output), SCHEMA)
            return True
        case GuideKind.JSON_OBJECT:
            return isinstance(json.loads(output), dict)
        case GuideKind.CHOICE:
            return output in guide.choices
        case GuideKind.GRAMMAR:
            return re.fullmatch("a(x*zy*)+", output) is not None and output.count("x") == output.count("y")
    return re.fullmatch(guide.text, output) is not None


@pytest.mark.parametrize("guide", GUIDES.values(), ids=GUIDES)
def test_an_output_that_ends_by_itself_matches_its_guide(guide: Guide) -> None:
    requests = [guided(f"{seed}", guide, seed=seed) for seed in range(8)]
    outputs, ends = run(make_engine(device=device(512), max_running=8), *requests)
    stopped = [id for id, end in ends.items() if end.reason is FinishReason.STOP]
    assert stopped
    for id in stopped:
        assert ends[id].stop_token == END
        assert matches(guide, text(outputs[id])), text(outputs[id])


def test_an_output_that_max_tokens_ends_is_the_beginning_of_a_match() -> None:
    whole, _ = run(make_engine(device=device()), guided("a", GUIDES["schema"]))
    cut, ends = run(make_engine(device=device()), guided("a", GUIDES["schema"], max_tokens=5))
    assert ends["a"].reason is FinishReason.LENGTH
    assert cut["a"] == whole["a"][:5]


@pytest.mark.parametrize("guide", GUIDES.values(), ids=GUIDES)
def test_an_engine_that_gets_the_first_tokens_of_an_output_continues_it(guide: Guide) -> None:
    request = guided("a", guide)
    outputs, _ = run(make_engine(device=device()), request)
    for count in range(1, len(outputs["a"])):
        tokens = (*request.token_ids, *outputs["a"][:count])
        continued = replace(request, token_ids=tokens, prompt_tokens=request.prompt_len)
        rest, _ = run(make_engine(device=device()), continued)
        assert rest["a"] == outputs["a"][count:]


def test_guided_sequences_that_are_preempted_give_the_outputs_that_each_gives_alone() -> None:
    seeds = [(name, seed) for seed, name in enumerate((*GUIDES, *GUIDES))]
    requests = [guided(f"{name}-{seed}", GUIDES[name], seed=seed) for name, seed in seeds]
    requests.append(make_request("free", [1, 2, 3, 4, 5], max_tokens=30))
    alone = {request.id: run(make_engine(device=device()), request)[0][request.id] for request in requests}
    engine = make_engine(device=device(14), context_length=50)
    outputs, _ = run(engine, *requests)
    assert engine.scheduler.preemptions
    assert outputs == alone


def test_the_outputs_of_one_prompt_follow_the_grammar_with_their_own_draws() -> None:
    first = guided("a", GUIDES["regex"])
    requests = [
        replace(first, id=f"{index}", sampling=replace(first.sampling, output_index=index)) for index in range(6)
    ]
    outputs, _ = run(make_engine(device=device(512)), *requests)
    assert len({tuple(output) for output in outputs.values()}) > 1
    assert all(matches(GUIDES["regex"], text(output)) for output in outputs.values())


def test_a_grammar_that_fails_ends_its_sequence_by_the_field_and_no_other() -> None:
    """Also the tokens of the step that failed do not count."""

    def allowed(output: Sequence[int]) -> set[int]:
        if len(output) == 3:
            raise ValueError("the lexer has too many states")
        return {5, 6}

    engine = make_engine(device=device())
    failing = make_request("bad", [1, 2, 3], grammar=ScriptedGrammar(allowed))
    outputs, ends = run(engine, failing, guided("good", GUIDES["choice"]), make_request("free", [1, 2, 3, 4, 5]))
    assert len(outputs["bad"]) == 3
    assert ends["bad"].reason is FinishReason.FAILED
    fault = ends["bad"].fault
    assert fault is not None
    assert fault.field == "guided.regex"
    assert fault.value == "the lexer has too many states"
    assert ends["good"].fault is None
    assert {ends["good"].reason, ends["free"].reason} <= {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.slow
@pytest.mark.parametrize("is_computing", [True, False])
def test_a_grammar_that_never_gives_a_mask_ends_its_sequence_and_no_other(
    is_computing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask, "MASK_SECONDS", 0.2 if is_computing else 600.0)
    monkeypatch.setattr(mask, "LONGEST_WAIT_SECONDS", 600.0 if is_computing else 0.2)
    is_over, threads = threading.Event(), set[threading.Thread]()

    def free(output: Sequence[int]) -> set[int]:
        threads.add(threading.current_thread())
        return {5, 6}

    def stuck(output: Sequence[int]) -> set[int]:
        threads.add(threading.current_thread())
        while len(output) == 2 and not is_over.wait(0 if is_computing else None):
            pass
        return {5, 6}

    requests = [
        make_request(name, [1, 2, 3], grammar=ScriptedGrammar(stuck if name == "bad" else free))
        for name in ("before", "bad", "behind", "next", "last")
    ]
    try:
        outputs, ends = run(make_engine(device=device()), *requests)
    finally:
        is_over.set()
    assert len(outputs.pop("bad")) == 2
    fault = ends.pop("bad").fault
    assert fault is not None
    assert "one that takes longer" in str(fault)
    assert all(len(output) == 8 for output in outputs.values())
    assert {end.reason for end in ends.values()} == {FinishReason.LENGTH}
    beside = threads - {threading.current_thread()}
    assert len(beside) <= 3, "that of the batch, and two that compute its masks one after the other"


@pytest.mark.slow
def test_a_mask_that_waits_for_the_processor_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the thread of the masks may wait for seconds before it runs."""
    monkeypatch.setattr(mask, "MASK_SECONDS", 0.3)

    def late(output: Sequence[int]) -> set[int]:
        if len(output) == 2:
            time.sleep(1.0)
        return {5, 6}

    outputs, ends = run(make_engine(device=device()), make_request("a", [1, 2, 3], grammar=ScriptedGrammar(late)))
    assert ends["a"].reason is FinishReason.LENGTH
    assert len(outputs["a"]) == 8


@pytest.mark.slow
def test_a_mask_has_its_second_while_other_threads_use_many_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "process_time", itertools.count(step=10.0).__next__)

    def late(output: Sequence[int]) -> set[int]:
        if len(output) == 2:
            time.sleep(0.3)
        return {5, 6}

    _, ends = run(make_engine(device=device()), make_request("a", [1, 2, 3], grammar=ScriptedGrammar(late)))
    assert ends["a"].reason is FinishReason.LENGTH


def test_a_grammar_with_one_endless_text_gives_a_mask_for_each_token() -> None:
    endless = Guide(GuideKind.GRAMMAR, 'start: T T\nT: "t"+\n')  # the first T takes each letter
    outputs, ends = run(make_engine(device=device()), guided("a", endless, max_tokens=12))
    assert text(outputs["a"]) == 12 * "t"
    assert ends["a"].reason is FinishReason.LENGTH


def test_as_many_choices_as_allowed_are_followed() -> None:
    choices = tuple(f"c{number:04d}" for number in range(MAX_CHOICES))
    outputs, ends = run(make_engine(device=device()), guided("a", Guide(GuideKind.CHOICE, choices=choices)))
    assert text(outputs["a"]) in choices
    assert ends["a"].stop_token == END


def test_an_error_of_a_grammar_names_its_line() -> None:
    with pytest.raises(InvalidRequest, match=r"at 2\(4\): unknown name"):
        compiler().grammar(Guide(GuideKind.GRAMMAR, "start: a\na: nothing")).prepare()


def test_a_grammar_serves_any_number_of_outputs_whose_states_its_lexer_can_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each output alone has fewer states than the limit, and all of them together have more."""
    monkeypatch.setitem(PARSER_LIMITS, "max_lexer_states", 300)
    guide = Guide(GuideKind.REGEX, "[ab]*a[ab]{24}")
    requests = [guided(f"{seed}", guide, seed=seed, max_tokens=60) for seed in range(12)]
    outputs, ends = run(make_engine(device=device(1024), max_running=4), *requests)
    assert len({tuple(output) for output in outputs.values()}) == len(outputs)
    assert [end.fault for end in ends.values()] == [None] * len(requests)
    together = GrammarCompiler.compile(compiler(), guide)[0]
    for output in outputs.values():
        each = together.deep_copy()
        for token in output:
            each.consume_token(token)
            each.compute_bitmask()
    assert each.is_error()
    assert TOO_MANY_STATES in each.get_error()


def test_an_output_with_more_states_than_the_limit_ends_by_the_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARSER_LIMITS, "max_lexer_states", 40)
    request = guided("a", Guide(GuideKind.REGEX, "[ab]*a[ab]{23}"), max_tokens=60)
    outputs, ends = run(make_engine(device=device(128)), request)
    assert 1 < len(outputs["a"]) < 60
    fault = ends["a"].fault
    assert fault is not None
    assert TOO_MANY_STATES in str(fault.value)


def test_a_sequence_makes_one_matcher_whatever_its_length() -> None:
    grammar = ScriptedGrammar(lambda output: {5, 6})
    run(make_engine(device=device()), make_request("a", [1, 2, 3], max_tokens=20, grammar=grammar))
    assert grammar.made == 1


@pytest.mark.parametrize(
    ("stop", "field"),
    [(StopParams(8, min_tokens=1), "min_tokens"), (StopParams(8, ignore_eos=True), "ignore_eos")],
)
def test_what_contradicts_a_guide_is_refused_by_its_field(stop: StopParams, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        make_request("a", stop=stop, grammar=ScriptedGrammar(lambda output: {5}))
    assert refused.value.field == field


def test_an_engine_refuses_a_grammar_that_does_not_compile() -> None:
    bad = compiler().grammar(Guide(GuideKind.REGEX, "a("))
    with pytest.raises(InvalidRequest, match=r"guided\.regex"):
        make_engine(device=device()).add(make_request("a", [1, 2], grammar=bad))


def test_stop_tokens_and_bias_hold_within_the_grammar() -> None:
    guide = Guide(GuideKind.REGEX, "[ab]{6}")
    bias = SamplingParams(logit_bias={0: 100.0, 5: 100.0})
    (request,) = [replace(guided("a", guide), sampling=bias)]
    outputs, _ = run(make_engine(device=device()), request)
    assert text(outputs["a"]) == "aaaaaa"
    stopping = replace(request, stop=StopParams(40, stop_token_ids=frozenset({0})))
    outputs, ends = run(make_engine(device=device()), stopping)
    assert outputs["a"] == [0]
    assert ends["a"].stop_token == 0
