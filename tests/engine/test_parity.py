from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from decant.engine.checkpoint import checkpoint
from decant.engine.engine import Engine
from decant.engine.errors import InvalidConfig
from decant.engine.kv_layout import WindowKind, longest_sequence
from decant.engine.loading import load
from decant.engine.model import rope
from decant.engine.model.backend import TorchBackend
from decant.engine.model.model import ModelConfig, ModelDevice
from decant.engine.model.probe import learn_attention
from decant.engine.model.runner import ModelRunner
from decant.engine.request import FinishReason, Request, StopParams
from decant.engine.scheduler import Limits
from tests.engine import tiny, tiny_configs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

COUNT = 12

NARROW = 1e-4
"""Margin of the two likeliest tokens below which rounding may choose either."""

PROMPTS = {f"p{length}": tiny.prompt(length, length) for length in (1, 5, 37, 90)}
BUDGETS = {"1": 1, "7": 7, "unlimited": 4096}
"""24 and 64 are those of cancels and of preemption."""

ROOM = 4 << 20

each_model = pytest.mark.parametrize("name", tiny_configs.SERVED, scope="module")
"""Of module scope, so that all tests of a model follow each other: the process that runs them makes it once."""


@dataclass
class Tally:
    compared: int = 0
    narrow: list[str] = field(default_factory=list)

    def compare(self, label: str, ours: Sequence[int], theirs: tiny.Written) -> None:
        """Require equal tokens up to a first difference at which the reference's margin is narrow."""
        self.compared += 1
        assert len(ours) == len(theirs.tokens), label
        for position, (one, other) in enumerate(zip(ours, theirs.tokens, strict=True)):
            if one != other:
                margin = theirs.margins[position]
                assert margin < NARROW, f"{label}: token {position} is {one}, generate wrote {other} by {margin:.2g}"
                self.narrow.append(f"{label} at token {position}, margin {margin:.1e}")
                return


@pytest.fixture(scope="module")
def tally(record_testsuite_property: Callable[[str, object], None]) -> Iterator[Tally]:
    counted = Tally()
    yield counted
    record_testsuite_property("parity_sequences", counted.compared)
    record_testsuite_property("parity_narrow_differences", len(counted.narrow))
    print(f"\nparity: {counted.compared} sequences, {len(counted.narrow)} differ, at margins under {NARROW}")
    print("\n".join(counted.narrow))
    assert len(counted.narrow) <= 0.01 * counted.compared


@dataclass
class Subject:
    name: str
    folder: Path
    model: PreTrainedModel
    device: ModelDevice
    written: dict[str, tiny.Written]


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    made: dict[str, Subject] = {}

    def subject(name: str) -> Subject:
        if name not in made:
            folder = tiny.save(tiny.config(name), tmp_path_factory.mktemp(name))
            device = load(
                ModelConfig(
                    str(folder), dtype="float32", device="cpu", kv_bytes=ROOM, context_length=tiny.CONTEXT_LENGTH
                )
            )
            model = tiny.reference(folder)
            # The served context length decides the scaling, for short prompts too.
            rope.freeze(model, device.context_length)
            written = {id: tiny.generate(model, tokens, COUNT) for id, tokens in PROMPTS.items()}
            made[name] = Subject(name, folder, model, device, written)
        return made[name]

    return subject


def engine_on(device: ModelDevice, budget: int = 64, max_running: int = 16) -> Engine:
    context_length = longest_sequence(device.windows, device.num_blocks, device.block_size, device.context_length)
    return Engine(
        device, Limits(token_budget=budget, max_running=min(budget, max_running), context_length=context_length)
    )


def all_prompts(**options) -> list[Request]:
    return [tiny.greedy(id, tokens, COUNT, **options) for id, tokens in PROMPTS.items()]


@each_model
def test_a_reference_output_is_worth_comparing(name, subjects):
    subject = subjects(name)
    assert 0.8 < tiny.spread(subject.model, torch.tensor([PROMPTS["p90"]])) < 1.25
    assert len({token for written in subject.written.values() for token in written.tokens}) > 8
    assert len({written.tokens[-1] for written in subject.written.values()}) > 1


@pytest.mark.parametrize("budget", BUDGETS)
@each_model
def test_any_chunking_generates_the_tokens_of_generate(name, budget, subjects, tally):
    subject = subjects(name)
    requests = all_prompts()[: -1 if budget == "1" else None]  # p90 decodes one token a step in the others
    run = tiny.run(engine_on(subject.device, BUDGETS[budget]), requests)
    assert max(step.num_tokens for step in run.steps) <= BUDGETS[budget]
    for id, tokens in run.tokens.items():
        tally.compare(f"{name}, budget {budget}, {id}", tokens, subject.written[id])


@each_model
def test_the_torch_backend_generates_the_tokens_of_generate(name, subjects, tally):
    subject, backend = subjects(name), TorchBackend(torch.device("cpu"))
    source, layout = checkpoint.open(str(subject.folder)), subject.device.store.layout
    model = source.read(torch.float32, torch.device("cpu"))
    rope.freeze(model, subject.device.context_length)
    layer_windows, specs = learn_attention(model, source.name, subject.device.context_length)
    assert specs == layout.layers
    store = backend.make_store(layout, subject.device.num_blocks, torch.float32)
    device = replace(
        subject.device,
        model=model,
        store=store,
        backend=backend,
        runner=ModelRunner(model, store, layer_windows, frozenset(), backend),
    )
    assert not any(type(module).__module__.startswith("decant.") for module in model.modules())
    for budget in (7, 4096):
        run = tiny.run(engine_on(device, budget), all_prompts(use_prefix_cache=budget == 7))
        for id, written in subject.written.items():
            tally.compare(f"{name}, plain, budget {budget}, {id}", run.tokens[id], written)


@each_model
def test_a_cached_prefix_generates_the_tokens_of_generate(name, subjects, tally):
    subject = subjects(name)
    engine = engine_on(subject.device)
    tiny.run(engine, [tiny.greedy("first", PROMPTS["p90"], COUNT)])
    longer = PROMPTS["p90"][:70] + tiny.prompt(9, 1234)
    again = tiny.run(engine, [tiny.greedy("p90", PROMPTS["p90"], COUNT), tiny.greedy("longer", longer, COUNT)])
    cached = 80 + 64  # whole blocks of 16 that both share with the first
    assert sum(step.num_tokens for step in again.steps) == 90 + 79 - cached + 2 * (COUNT - 1)
    tally.compare(f"{name}, cached", again.tokens["p90"], subject.written["p90"])
    tally.compare(
        f"{name}, cached in part", again.tokens["longer"], tiny.follow(subject.model, longer, again.tokens["longer"])
    )


@each_model
def test_preemption_and_recomputation_generate_the_tokens_of_generate(name, subjects, tally):
    subject = subjects(name)
    device, backend = subject.device, subject.device.backend
    store = backend.make_store(device.store.layout, 7, torch.float32)
    runner = ModelRunner(device.model, store, device.runner.layer_windows, frozenset(), backend)
    engine = engine_on(replace(device, store=store, runner=runner), 64)
    prompts = {f"s{seed}": tiny.prompt(14 + seed, seed) for seed in range(5)}
    run = tiny.run(engine, [tiny.greedy(id, tokens, 26) for id, tokens in prompts.items()])
    assert engine.load().preemptions > 0
    for id, tokens in prompts.items():
        tally.compare(f"{name}, preempted, {id}", run.tokens[id], tiny.follow(subject.model, tokens, run.tokens[id]))


@each_model
def test_remaining_sequences_continue_when_others_are_cancelled(name, subjects, tally):
    subject = subjects(name)
    gone = [tiny.greedy(f"gone{index}", tiny.prompt(30, 50 + index), 40) for index in range(4)]
    requests = [request for pair in zip(gone, all_prompts(), strict=True) for request in pair]
    at = {0: "gone3", 2: "gone0", 5: "gone1", 9: "gone2"}  # waiting, in its prompt, and writing
    run = tiny.run(engine_on(subject.device, 24), requests, cancel=at)
    assert {id for id, reason in run.reasons.items() if reason == "cancelled"} == set(at.values())
    for id, written in subject.written.items():
        tally.compare(f"{name}, cancels, {id}", run.tokens[id], written)


@each_model
def test_bf16_generates_in_a_batch_what_it_generates_alone(name, subjects):
    config = ModelConfig(
        str(subjects(name).folder), dtype="bfloat16", device="cpu", kv_bytes=ROOM, context_length=tiny.CONTEXT_LENGTH
    )
    device = load(config)
    assert device.probe_result.exact
    together = tiny.run(engine_on(device, 19), all_prompts(use_prefix_cache=False))
    for request in all_prompts(use_prefix_cache=False):
        assert tiny.run(engine_on(device, 512), [request]).tokens[request.id] == together.tokens[request.id]


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2"])
def test_bf16_follows_generate_where_it_is_sure(name, subjects):
    subject = subjects(name)
    device = load(ModelConfig(str(subject.folder), dtype="bfloat16", device="cpu", kv_bytes=ROOM))
    tokens = tiny.prompt(100, 5)
    with torch.no_grad():
        best = subject.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].topk(2)
    sure = [at for at in range(100) if best.values[at, 0] - best.values[at, 1] > 0.3]
    requests = [Request(str(at), tokens[: at + 1], stop=StopParams(max_tokens=1, ignore_eos=True)) for at in sure]
    run = tiny.run(engine_on(device, 256), requests)
    agreeing = [run.tokens[str(at)] == [int(best.indices[at, 0])] for at in sure]
    assert len(sure) > 20
    assert sum(agreeing) > 0.95 * len(sure)


def test_layer_windows_are_those_of_the_configuration(subjects):
    kinds = {
        name: [(view.kind, view.size) for view in subjects(name).device.runner._layer_windows]
        for name in tiny_configs.SERVED
    }
    full, sliding = (WindowKind.FULL, 0), (WindowKind.SLIDING, 24)
    assert kinds["llama"] == [full, full]
    assert kinds["mistral"] == [sliding, sliding]
    assert kinds["gemma2"] == kinds["gemma3_text"] == kinds["gemma3"] == kinds["gpt_oss"] == [sliding, full]
    assert sorted(kinds["qwen2_moe"], key=str) == sorted([sliding, full], key=str)
    assert kinds["llama4_text"] == [(WindowKind.CHUNKED, 32), full]


def test_keys_and_values_may_differ_in_width(subjects):
    spec = subjects("deepseek_v3").device.store.layout.layers[0]
    assert spec.key_dim != spec.value_dim


@pytest.mark.parametrize(
    ("name", "tower"), [("gemma3", "vision_tower"), ("llava", "vision_tower"), ("qwen2_5_vl", "visual")]
)
def test_a_vision_tower_is_freed(name, tower, subjects):
    subject = subjects(name)
    assert [name for name, _ in subject.model.named_parameters() if tower in name]
    assert not [name for name, _ in subject.device.model.named_parameters() if tower in name]


def test_longrope_is_frozen_by_the_served_context_length(subjects):
    folder = subjects("phi3_longrope").folder
    short = load(ModelConfig(str(folder), dtype="float32", device="cpu", kv_bytes=ROOM, context_length=64))
    moving = tiny.reference(folder)
    run = tiny.run(engine_on(short, 32), [tiny.greedy("p37", PROMPTS["p37"], COUNT)])
    assert tuple(run.tokens["p37"]) == tiny.generate(moving, PROMPTS["p37"], COUNT).tokens
    assert tuple(run.tokens["p37"]) != subjects("phi3_longrope").written["p37"].tokens
    beyond = tiny.run(engine_on(subjects("phi3_longrope").device), [tiny.greedy("p90", PROMPTS["p90"], COUNT)])
    assert tuple(beyond.tokens["p90"]) == tiny.generate(moving, PROMPTS["p90"], COUNT).tokens


def test_dynamic_scaling_is_frozen_by_the_served_context_length(subjects, tmp_path):
    subject = subjects("llama_dynamic_rope")
    short = load(ModelConfig(str(subject.folder), dtype="float32", device="cpu", kv_bytes=ROOM))
    assert (short.context_length, subject.device.context_length) == (tiny.CONTEXT_LENGTH // 4, tiny.CONTEXT_LENGTH)
    run = tiny.run(engine_on(short, 32), [tiny.greedy("p37", PROMPTS["p37"], COUNT)])
    assert tuple(run.tokens["p37"]) == tiny.generate(tiny.reference(subject.folder), PROMPTS["p37"], COUNT).tokens
    assert tuple(run.tokens["p37"]) != subject.written["p37"].tokens
    base = 10000.0 * (4 * 4 - 3) ** (16 / 14)  # of heads of 16, scaled by 4 for 4 times the length
    folder = Path(shutil.copytree(subject.folder, tmp_path / "still"))
    made = json.loads((folder / "config.json").read_text())
    made["rope_parameters"] = {"rope_type": "default", "rope_theta": base}
    (folder / "config.json").write_text(json.dumps(made))
    still = tiny.reference(folder)
    for id, tokens in PROMPTS.items():
        assert tiny.generate(still, tokens, COUNT).tokens == subject.written[id].tokens


_SHORT = tiny.CONTEXT_LENGTH // 4
_SCALED = {"rope_theta": 10000.0, "factor": 4.0}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": _SHORT}


@pytest.mark.parametrize(
    ("scaling", "positions", "default", "longest"),
    [
        (tiny_configs.YARN, _SHORT, tiny.CONTEXT_LENGTH, tiny.CONTEXT_LENGTH),  # as Qwen2.5's documentation says
        (tiny_configs.YARN, tiny.CONTEXT_LENGTH, tiny.CONTEXT_LENGTH, tiny.CONTEXT_LENGTH),  # as DeepSeek writes it
        ({"rope_type": "llama3", **_SCALED, **_LLAMA3}, tiny.CONTEXT_LENGTH, tiny.CONTEXT_LENGTH, tiny.CONTEXT_LENGTH),
        ({"rope_type": "llama3", **_SCALED, **_LLAMA3}, _SHORT, tiny.CONTEXT_LENGTH, tiny.CONTEXT_LENGTH),
        ({"rope_type": "linear", **_SCALED}, _SHORT, _SHORT, tiny.CONTEXT_LENGTH),
    ],
    ids=str,
)
def test_a_scaled_context_is_served_to_its_end(scaling, positions, default, longest, tmp_path):
    made = tiny.config("llama", rope_parameters=dict(scaling), max_position_embeddings=positions)
    folder = tiny.save(made, tmp_path)
    source = checkpoint.open(str(folder))
    assert (source.choose_context_length(None), source.choose_context_length(longest)) == (default, longest)
    with pytest.raises(InvalidConfig, match=f"at most the checkpoint's {longest} positions"):
        source.choose_context_length(longest + 1)
    device = load(ModelConfig(str(folder), dtype="float32", device="cpu", kv_bytes=ROOM, context_length=longest))
    prompt = tiny.prompt(longest - COUNT - 1, 7)
    run = tiny.run(engine_on(device), [tiny.greedy("long", prompt, COUNT)])
    assert tuple(run.tokens["long"]) == tiny.generate(tiny.reference(folder), prompt, COUNT).tokens


def test_generation_stops_at_an_end_token(subjects, tmp_path):
    end = subjects("llama").written["p37"].tokens[4]
    folder = tiny.save(tiny.config("llama"), tmp_path)
    device = load(
        ModelConfig(str(folder), dtype="float32", device="cpu", kv_bytes=ROOM, eos_token_ids=frozenset({end}))
    )
    engine = engine_on(device)
    engine.add(Request("stops", PROMPTS["p37"], stop=StopParams(max_tokens=COUNT)))
    engine.add(Request("goes on", PROMPTS["p37"], stop=StopParams(max_tokens=COUNT, ignore_eos=True)))
    ended = {}
    while engine.has_work:
        ended.update({one.id: one for one in engine.step().ended})
    assert (ended["stops"].reason, ended["stops"].stop_token) == (FinishReason.STOP, end)
    assert len(ended["stops"].timeline.tokens) == 5
    assert ended["goes on"].reason is FinishReason.LENGTH
