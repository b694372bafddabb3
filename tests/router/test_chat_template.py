from __future__ import annotations

import resource
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from transformers import AutoTokenizer

from decant.protos import inference_pb2 as pb
from decant.router.text import template_channel
from decant.router.text.chat_template import ChatTemplate
from decant.router.text.served_model import ServedModel, load, served
from decant.router.text.template_process import process
from decant.runtime.errors import InvalidArgument
from decant.runtime.model_files import ModelUnreadable, find
from tests.router.chat_templates import BARE, LIKE
from tests.router.factories import unpacked, valid
from tests.router.tokenizer_factories import byte_level, folder

HELLO = [pb.Message(role="user", content="hello")]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    root = tmp_path_factory.mktemp("chat")

    @cache
    def pair(kind: str) -> tuple[ServedModel, Any]:
        config = {"chat_template": LIKE[kind], "pad_token": {"content": "<pad>", "__type": "AddedToken"}}
        place = folder(root / kind, byte_level(), config)
        return served(find(str(place))), AutoTokenizer.from_pretrained(str(place))

    return pair


def template(text: str, **tokens: str) -> ChatTemplate:
    return ChatTemplate(text, tokens)


async def rendered(text: str, messages: list[pb.Message] = HELLO) -> str:
    return (await template(text).render(messages, add_generation_prompt=True)).text


async def failure(text: str, messages: list[pb.Message] = HELLO) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as refused:
        await rendered(text, messages)
    assert refused.value.field == "messages"
    return refused.value


ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
TEXTS = st.text(max_size=12) | st.sampled_from(
    [" the quick brown dog \n", "<think>x</think>y", "{{ 1 }}", "<|im_end|>"]
)


# ------------------------------------------------------------------------------------ as transformers does


@pytest.mark.slow
@pytest.mark.parametrize("kind", LIKE)
@given(st.lists(st.tuples(ROLES, TEXTS), min_size=1, max_size=6), st.booleans())
@settings(max_examples=60, deadline=None)
async def test_a_conversation_becomes_the_tokens_that_transformers_makes_of_it(both, kind, turns, opens):
    ours, theirs = both(kind)
    messages = [pb.Message(role=role, content=text) for role, text in turns]
    plain = [{"role": role, "content": text} for role, text in turns]
    try:
        expected = theirs.apply_chat_template(plain, tokenize=False, add_generation_prompt=opens)
    except TemplateError:
        with pytest.raises(InvalidArgument):
            await ours.chat.render(messages, add_generation_prompt=opens)
        return
    made = await ours.chat.render(messages, add_generation_prompt=opens)
    assert made.text == expected
    ids = theirs.apply_chat_template(plain, add_generation_prompt=opens, return_dict=False)
    assert await ours.encode(made.text, special=False) == ids
    assert await ours.encode(made.text, special=False, written=made.written) == ids


async def test_messages_are_a_prompt_as_the_template_writes_it(both):
    ours, theirs = both("chatml")
    plain = [{"role": "user", "content": "the dog"}]
    messages = [pb.Message(role=message["role"], content=message["content"]) for message in plain]
    for asked, opens in (None, True), (True, True), (False, False):
        given = pb.Messages(messages=messages, add_generation_prompt=asked)
        made = await valid(
            served=replace(ours, max_context_length=None),
            messages=given,
            workers_context_length=4096,
            response=pb.ResponseOptions(echo=True),
        )
        expected = theirs.apply_chat_template(plain, add_generation_prompt=opens, return_dict=False)
        assert unpacked(made.engine_request.prompt) == expected
        assert made.output_options.echo == theirs.decode(expected, skip_special_tokens=True)


async def test_a_prompt_of_messages_that_is_too_long_is_refused_by_its_field(both):
    ours, _ = both("chatml")
    with pytest.raises(InvalidArgument) as refused:
        await valid(served=ours, messages=pb.Messages(messages=HELLO), workers_context_length=3)
    assert refused.value.field == "messages"


async def test_a_conversation_without_messages_is_refused(both):
    ours, _ = both("chatml")
    with pytest.raises(InvalidArgument) as refused:
        await valid(served=ours, messages=pb.Messages())
    assert refused.value.field == "messages.messages"


async def test_a_templates_own_error_message_reaches_the_client(both):
    ours, _ = both("mistral")
    messages = [pb.Message(role="assistant", content="x")]
    with pytest.raises(InvalidArgument) as refused:
        await valid(served=ours, messages=pb.Messages(messages=messages))
    assert refused.value.field == "messages"
    assert "must alternate" in refused.value.value


# ------------------------------------------------------------------------------------- which one it is


def chat_of(place: Path) -> ChatTemplate | None:
    return served(find(str(place))).chat


async def test_the_template_named_default_is_used(tmp_path):
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "it"}]
    for count, several in enumerate((named, {"rag": "rag", "default": "it"})):
        chat = chat_of(folder(tmp_path / str(count), byte_level(), {"chat_template": several}))
        assert chat is not None
        assert (await chat.render(HELLO, add_generation_prompt=True)).text == "it"
    assert chat_of(folder(tmp_path / "none", byte_level(), {"chat_template": named[:1]})) is None
    assert chat_of(folder(tmp_path / "bare", byte_level())) is None


async def test_a_template_file_overrides_the_configuration(tmp_path):
    place = folder(tmp_path / "m", byte_level(), {"chat_template": "old"})
    (place / "chat_template.jinja").write_text("new é")
    chat = chat_of(place)
    assert chat is not None
    theirs = AutoTokenizer.from_pretrained(str(place))
    plain = [{"role": "user", "content": "x"}]
    assert (await chat.render(HELLO, add_generation_prompt=True)).text == "new é"
    assert theirs.apply_chat_template(plain, tokenize=False) == "new é"
    (place / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelUnreadable, match="chat_template"):
        chat_of(place)


# ------------------------------------------------------------------------------------ the form of content

PARTS_ONLY = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}"
    "{% endfor %}"
)
EITHER = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part['text'] | trim }}{% endfor %}{% endif %}{% endfor %}"
)
PARTS_OF_USERS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    "{% else %}{{ m.content + '' }}{% endif %}{% endfor %}"
)
FORMATS = {"parts": PARTS_ONLY, "either": EITHER, "users": PARTS_OF_USERS}


@pytest.mark.parametrize("kind", FORMATS)
async def test_a_template_that_takes_typed_parts_gets_the_text_in_one(kind):
    turns = [("system", "brief"), ("user", "hello"), ("assistant", "yes?"), ("user", "again")]
    messages = [pb.Message(role=role, content=text) for role, text in turns]
    assert await rendered(FORMATS[kind], messages) == "".join(f"<{role}>{text}" for role, text in turns)


async def test_a_template_that_takes_texts_gets_texts():
    assert await rendered("{{ messages[0].content is string }}{{ messages }}") == (
        "True[{'role': 'user', 'content': 'hello'}]"
    )


async def test_parts_have_the_tokens_that_transformers_makes_of_them(tmp_path):
    place = folder(tmp_path / "parts", byte_level(), {"chat_template": PARTS_ONLY.replace("<", "<|tool|>")})
    ours, theirs = served(find(str(place))), AutoTokenizer.from_pretrained(str(place))
    plain: Any = [{"role": "user", "content": [{"type": "text", "text": "the dog <"}]}]
    assert ours.chat is not None
    made = await ours.chat.render([pb.Message(role="user", content="the dog <")], add_generation_prompt=True)
    expected = theirs.apply_chat_template(plain, return_dict=False)
    assert await ours.encode(made.text, special=False, written=made.written) == expected


LACKING = {
    "{{ 1 }}\n{{ messages | shout }}": "line 2: No filter named 'shout'.",
    "\n{% if x is shouted %}{% endif %}": "line 2: No test named 'shouted'.",
    "\n\n{{ today() }}": "line 3: there is no function 'today'",
    "{% if never %}\n{{ load_file('x') }}{% endif %}": "line 2: there is no function 'load_file'",
    "{% include 'other.jinja' %}": "line 1: include: templates have no other files",
    "{% from 'macros' import m %}{{ m(1) }}": "line 1: import: templates have no other files",
    "\n{% if %}": "line 2: Expected an expression",
    "\n{% audio %}": "line 2: Encountered unknown tag 'audio'",
}


@pytest.mark.slow
@pytest.mark.parametrize("text", LACKING)
def test_a_template_that_uses_what_is_missing_is_refused_at_load_with_the_line(tmp_path, text):
    place = folder(tmp_path / "m", byte_level(), {"chat_template": text})
    with pytest.raises(ModelUnreadable, match="chat template can't be used") as refused:
        load([str(place)])
    assert LACKING[text] in str(refused.value)


@pytest.mark.parametrize("kind", LIKE)
def test_templates_that_are_complete_are_loaded(tmp_path, kind):
    assert load([str(folder(tmp_path / kind, byte_level(), {"chat_template": LIKE[kind]}))]).default.has_chat_template


def test_a_template_that_looks_for_a_function_needs_none(tmp_path):
    guarded = "{% if today is defined %}{{ today() }}{% endif %}{% macro m(f) %}{{ f() }}{% endmacro %}{{ messages }}"
    place = folder(tmp_path / "m", byte_level(), {"chat_template": guarded})
    assert load([str(place)]).default.has_chat_template


# -------------------------------------------------------------------------------------- hostile templates


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ tojson.__globals__ }}",
        "{{ self._TemplateReference__context.environment.from_string('x').render() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ 'x' | attr('__class__') | attr('__name__') }}",
        "{{ ('{0.__class__}').format(messages) }}",
    ],
)
async def test_a_template_reaches_nothing(text):
    try:
        shown = await rendered(text)
    except InvalidArgument:
        return
    assert shown == ""  # what the sandbox hides is undefined


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "{{ 'x' * 10 ** 10 }}",
        "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ '%2000000000d' % 1 }}",
        "{% for i in range(100000000) %}x{% endfor %}",
        "{{ undefined_function() }}",
        "{{ 1 / 0 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% if %}",
        "{{ messages[7].content.strip() }}",
    ],
)
async def test_a_failed_rendering_is_refused_and_the_next_is_served(text):
    refusal = await failure(text)
    assert refusal.value
    either = template("{% if messages[0].content == 'x' %}" + text + "{% else %}fine{% endif %}")
    if text == "{% if %}":
        return
    with pytest.raises(InvalidArgument):
        await either.render([pb.Message(role="user", content="x")], add_generation_prompt=True)
    assert (await either.render(HELLO, add_generation_prompt=True)).text == "fine"


async def test_a_slow_start_of_the_process_is_no_fault_of_a_conversation(monkeypatch):
    either = template("fine")
    late, exchange = [0.0], template_channel._exchange

    def starts_late(*arguments: Any) -> tuple[bytes, bytes]:
        reply = exchange(*arguments)
        late[0] = 2 * either._channel.timeout_s  # the first exchange ends with the start
        return reply

    monkeypatch.setattr(template_channel, "_exchange", starts_late)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late[0])
    monkeypatch.setattr(template_channel, "time", clock)
    either._channel.timeout_s = 30.0
    assert (await either.render(HELLO, add_generation_prompt=True)).text == "fine"


@pytest.mark.slow
async def test_a_template_that_does_not_end_is_killed():
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    either = template("{% if messages[0].content == 'x' %}" + loops + "{% else %}fine{% endif %}")
    either._channel.timeout_s = 0.5
    with pytest.raises(InvalidArgument) as refused:
        await either.render([pb.Message(role="user", content="x")], add_generation_prompt=True)
    assert "0.5 seconds" in refused.value.value
    either._channel.timeout_s = 60.0
    assert (await either.render(HELLO, add_generation_prompt=True)).text == "fine"


async def test_a_rendered_text_is_limited():
    async def limited(text: str) -> str:
        return (await ChatTemplate(text, {}, max_characters=1000).render(HELLO, add_generation_prompt=True)).text

    with pytest.raises(InvalidArgument) as refused:
        await limited("{% for i in range(2000) %}x{% endfor %}")
    assert refused.value.field == "messages"
    assert "1000" in refused.value.value
    assert len(await limited("{% for i in range(1000) %}x{% endfor %}")) == 1000


async def test_a_conversation_larger_than_any_pipe_goes_through():
    large = "日" * 300_000
    assert await rendered(BARE, [pb.Message(role="user", content=large)]) == large


@pytest.mark.slow
async def test_a_process_that_ended_while_idle_is_replaced():
    chat = template("{{ messages[0].content }}")
    assert (await chat.render(HELLO, add_generation_prompt=True)).text == "hello"
    assert chat._channel._process is not None
    chat._channel._process.kill()
    chat._channel._process.wait()
    assert (await chat.render(HELLO, add_generation_prompt=True)).text == "hello"


async def test_the_template_process_ends_with_its_model():
    chat = template("{{ messages[0].content }}")
    await chat.render(HELLO, add_generation_prompt=True)
    process = chat._channel._process
    assert process is not None
    assert process.poll() is None
    del chat
    assert process.wait(60) != 0


@pytest.mark.parametrize(("platform", "has_memory_limit"), [("linux", True), ("darwin", False)])
def test_memory_is_limited_where_the_platform_accepts_it(
    monkeypatch: pytest.MonkeyPatch, platform: str, has_memory_limit: bool
) -> None:
    limits: dict[int, tuple[int, int]] = {}
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, values: limits.update({kind: values}))
    process.confine()
    assert (resource.RLIMIT_AS in limits) == has_memory_limit
    assert limits[resource.RLIMIT_NOFILE] == limits[resource.RLIMIT_NPROC] == (0, 0)


async def test_a_template_takes_the_time_of_acceptance_for_now() -> None:
    chat = ChatTemplate("{% macro day() %}{{ strftime_now('%Y-%m') }}{% endmacro %}{{ day() }}", {})
    assert (await chat.render(HELLO, add_generation_prompt=True, unix_time=86_400.0 * 45)).text == "1970-02"
    assert (await chat.render(HELLO, add_generation_prompt=True)).text >= "2025-01"
