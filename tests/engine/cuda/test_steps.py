from __future__ import annotations

import gc
import weakref
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.errors import TritonError

from decant.engine.cuda import attention as attention_module
from decant.engine.cuda import graphs as graphs_module
from decant.engine.cuda import runner as cuda_runner
from decant.engine.cuda import step_draw
from decant.engine.cuda.graph_sizes import GraphLimits, GraphSize, graph_sizes, most_items
from decant.engine.cuda.graphs import Capture, Replay, StepGraph, StepGraphs, StepOutput
from decant.engine.cuda.runner import CudaRunner
from decant.engine.cuda.sampler import TritonSampler
from decant.engine.cuda.staging import Download, Staging
from decant.engine.cuda.static_attention import StaticAttention
from decant.engine.cuda.step_draw import StepDraw
from decant.engine.engine import Engine
from decant.engine.loading import load
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.kv_store import KvStore
from decant.engine.model.model import ModelConfig, ModelDevice
from decant.engine.model.runner import StepLogits
from decant.engine.model.sampler import Sampler
from decant.engine.model.step_batch import flatten
from decant.engine.plan import Row
from decant.engine.request import Request, SamplingParams, StopParams
from decant.engine.sampler_state import SamplerState
from decant.engine.scheduler import Limits
from tests import gpu
from tests.engine import tiny
from tests.engine.cuda.test_backend import LAYOUT, SINGLE_KEY_HEAD, InterpretedBackend, shorten_trials

DEVICE = torch.device(gpu.device_type())
VOCABULARY = 200
EOS = frozenset({7})


class Rerun:
    """Capture whose replay computes again over the same buffers, as a graph does."""

    replays = 0

    def __call__(self, compute: Replay) -> Replay:
        output = StepOutput(*(part.clone() for part in compute()))

        def replay() -> StepOutput:
            self.replays += 1
            for part, computed in zip(output, compute(), strict=True):
                part.copy_(computed)
            return output

        return replay

    def used_bytes(self) -> int:
        return 0


def recorded(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fact: Callable[..., Any]) -> list[Any]:
    facts: list[Any] = []
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        facts.append(fact(*args))
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return facts


def rows_of_a_step() -> list[Row]:
    requests = [
        Request("plain", tuple(range(9))),
        Request("biased", (1, 2, 3), sampling=SamplingParams(logit_bias={5: 60.0, 9: -60.0}), logprobs=2),
        Request("ended too early", (4, 5), stop=StopParams(min_tokens=4), logprobs=0),
        Request("penalised", (1, 1, 2, 3), sampling=SamplingParams(1.0, seed=2, repetition_penalty=1.5), logprobs=5),
        Request("drawn", tuple(range(30)), sampling=SamplingParams(0.8, top_k=9, seed=5), prompt_logprobs=3),
        Request("chunk", tuple(range(40)), prompt_logprobs=1),
        Request("not finite", (8, 9), logprobs=1),
    ]
    rows = []
    for index, request in enumerate(requests):
        tokens, start = (
            list(request.token_ids),
            0 if request.prompt_logprobs is not None else len(request.token_ids) - 1,
        )
        end = 20 if request.id == "chunk" else len(tokens)
        blocks = (array("i", range(3 * index, 3 * index + 3)),)
        rows.append(Row(request, tokens, start, end, blocks, end == len(tokens), SamplerState(request)))
    return rows


def test_a_step_draws_what_the_plain_sampler_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_draw, "LOGPROB_ROWS", 2)
    rows = rows_of_a_step()
    flat = flatten(rows, 16, 99)
    step = StepLogits(flat, Sampler())
    logits = torch.randn(len(step.keep), VOCABULARY, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    logits[:, 50:60] = logits[:, 40:50]
    owner = flat.rows.index(rows[6])
    logits[int(step.kept[: owner + 1].sum()) - 1, 3] = float("nan")
    expected = step.result(logits, EOS)
    drawn = torch.full((len(rows),), -1, dtype=torch.int64, device=DEVICE)
    waits = recorded(monkeypatch, Download, "wait", lambda download: download)
    output = StepOutput(logits, *TritonSampler().top(logits))
    launched = StepDraw(StepLogits(flat, Sampler()), output, EOS, drawn, Staging(DEVICE), TritonSampler())
    assert not waits
    result = launched.result()
    assert len(waits) == 1
    assert result.sampled == expected.sampled
    assert result.failed == expected.failed
    assert result.logprobs.keys() == expected.logprobs.keys() == {1, 2, 3}
    for index, entry in expected.logprobs.items():
        assert result.logprobs[index] == entry
    assert result.prompt_logprobs == expected.prompt_logprobs
    for index, token in enumerate(result.sampled):
        assert token is None or drawn[index] == token


@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_step_in_which_all_rows_draw_greedily_draws_what_the_plain_sampler_draws(logprobs: int | None) -> None:
    lengths = (5, 9, 3)
    rows = [
        Row(request := Request(str(end), tuple(range(end)), logprobs=logprobs), list(range(end)), end - 1, end,
            (array("i", [at]),), True, SamplerState(request))
        for at, end in enumerate(lengths)
    ]  # fmt: skip
    flat = flatten(rows, 16, 99)
    logits = torch.randn(len(rows), VOCABULARY, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected = StepLogits(flat, Sampler()).result(logits, EOS)
    drawn = torch.full((len(rows),), -1, dtype=torch.int64, device=DEVICE)
    output = StepOutput(logits, *TritonSampler().top(logits))
    result = StepDraw(StepLogits(flat, Sampler()), output, EOS, drawn, Staging(DEVICE), TritonSampler()).result()
    assert result.sampled == expected.sampled == drawn.tolist()
    assert result.logprobs == expected.logprobs
    assert flat.order.tolist() != [0, 1, 2], "the rows are in another order than the plan"


def load_interpreted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capture: Callable[[CudaRunner], None] = lambda runner: None
) -> ModelDevice:
    shorten_trials(monkeypatch)
    config = ModelConfig(str(folder), dtype="float32", device=DEVICE.type, context_length=64, kv_bytes=1 << 20)
    device = load(config, backend=InterpretedBackend(DEVICE))
    assert isinstance(device.runner, CudaRunner)
    capture(device.runner)
    return device


def host_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    def counted(name: str) -> Any:
        method = getattr(torch.Tensor, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return method(*args, **kwargs)

        return call

    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, counted(name))
    return calls


@pytest.mark.slow
def test_batches_replayed_with_padding_generate_what_transformers_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = recorded(monkeypatch, Staging, "upload", lambda *_: InterpretedBackend.inside)
    config = tiny.config("llama", **SINGLE_KEY_HEAD)
    config.num_hidden_layers = 1
    folder = tiny.save(config, tmp_path)
    rerun = Rerun()
    monkeypatch.setattr(cuda_runner, "Capture", lambda device: rerun)
    monkeypatch.setattr("decant.engine.cuda.graphs.graph_sizes", lambda limits: [GraphSize(24, 4), GraphSize(4, 4)])
    device = load_interpreted(folder, monkeypatch, lambda runner: runner.capture(64, GraphLimits()))
    graphed = recorded(monkeypatch, StepGraph, "prepare", lambda graph, flat: len(flat.tokens))
    engine = Engine(device, Limits(token_budget=16, max_running=4, context_length=64))
    prompts = {"long": tiny.prompt(20, 1), "short": tiny.prompt(3, 2), "other": tiny.prompt(5, 3)}
    calls = host_reads(monkeypatch)
    cleared = recorded(monkeypatch, torch.Tensor, "index_fill_", lambda *_: 1)
    submit, ahead = device.runner.submit, []

    def watched(plan: Any) -> Any:
        before = len(calls)
        ahead.append(len(plan.inputs))
        wait = submit(plan)
        assert calls[before:] == [], "a launch waits for the device"
        return wait

    monkeypatch.setattr(device.runner, "submit", watched)
    result = tiny.run(engine, [tiny.greedy(id, tokens, 5) for id, tokens in prompts.items()])
    assert all(launches), "a launch on whatever device is current"
    assert set(graphed) == {24, 4}, "mixed batches and decodes"
    assert rerun.replays == len(graphed) == len(ahead) >= 6
    assert not cleared, "the null block of padding rows, or what no kernel reads"
    assert sum(ahead) >= 10, "rows continue tokens that are still drawn"
    monkeypatch.undo()
    reference = tiny.reference(folder)
    for id, tokens in prompts.items():
        assert tuple(result.tokens[id]) == tiny.generate(reference, tokens, 5).tokens


class FakeStore(KvStore):
    def __init__(self) -> None:
        super().__init__(LAYOUT, 3, torch.float32, DEVICE)


def logits_of_nothing(tokens: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, _: Any) -> torch.Tensor:
    return torch.zeros(len(keep), 5, device=DEVICE)


def captured(capture: Callable[[Replay], Replay], compute: Any = logits_of_nothing) -> StepGraphs:
    graphs = StepGraphs(FakeStore(), [AttentionWindow()], TritonSampler(), 4, is_exact=False)
    graphs.capture(compute, capture, GraphLimits(rows=32, tokens=128), lambda: 0)
    return graphs


def test_all_graphs_write_their_logits_to_one_buffer_and_the_largest_is_captured_first() -> None:
    outputs: list[torch.Tensor] = []

    def capture(compute: Replay) -> Replay:
        outputs.append(compute().logits)
        return compute

    graphs = captured(capture)
    assert [len(output) for output in outputs] == [65, 32, 16, 8, 4, 2, 1]
    assert [size.tokens for size in graphs.graphs] == [128, 32, 16, 8, 4, 2, 1]
    assert len({output.untyped_storage().data_ptr() for output in outputs}) == 1


def test_all_graphs_share_the_states_of_attention() -> None:
    states: set[int] = set()

    def compute(tokens: torch.Tensor, positions: Any, keep: Any, attention: StaticAttention) -> torch.Tensor:
        layers = attention._layers(0, 4)
        part = attention._make_lists(layers).lists[0]
        found = attention._states(part, LAYOUT.layers[0], 4)
        assert found.shape == (most_items(65), 1, 4, 18), "a state has the rows of a group, not of a tile"
        states.add(found.data_ptr())
        return logits_of_nothing(tokens, positions, keep, attention)

    captured(lambda compute: (compute(), compute)[1], compute)
    assert len(states) == 1


@pytest.mark.parametrize("error", [RuntimeError("operation not permitted"), TritonError("out of resource")])
def test_an_error_in_one_capture_keeps_the_other_graphs(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []

    def capture(compute: Replay) -> Replay:
        done.append(len(compute().logits))
        if done[-1] == 8:
            raise error
        return compute

    graphs = captured(capture)
    assert done == [size.rows for size in graph_sizes(GraphLimits(rows=32, tokens=128))]
    assert [size.tokens for size in graphs.graphs] == [128, 32, 16, 4, 2, 1]
    assert f"batches of 8 tokens and 8 rows have no CUDA graph: {error}" in caplog.text
    assert graphs.summary.startswith("6 of 7")


def test_no_garbage_is_left_for_a_collection_in_a_capture() -> None:
    """A tensor or a graph that is freed within ends the capture."""
    garbage = SimpleNamespace(tensor=torch.zeros(1))
    garbage.itself = garbage
    freed = weakref.ref(garbage.tensor)
    del garbage
    facts: set[tuple[bool, bool]] = set()

    def capture(compute: Replay) -> Replay:
        facts.add((freed() is None, gc.isenabled()))
        return compute

    captured(capture)
    assert facts == {(True, False)}
    assert gc.isenabled()


def test_a_runner_with_graphs_is_freed_without_the_collector() -> None:
    """It holds the weights and the KV memory."""

    def model(**inputs: Any) -> Any:
        return SimpleNamespace(logits=torch.zeros(1, inputs["input_ids"].shape[1], 5, device=DEVICE))

    class Eager(Rerun):
        def __call__(self, compute: Replay) -> Replay:
            output = compute()
            return lambda: output

    backend = InterpretedBackend(DEVICE)
    runner = CudaRunner(model, FakeStore(), [], frozenset(), backend, is_exact=False)  # type: ignore[arg-type]
    runner.capture(64, GraphLimits(rows=2, tokens=0), Eager())  # type: ignore[arg-type]
    assert runner.graphs is not None
    assert [size.rows for size in runner.graphs.graphs] == [2, 1]
    freed = weakref.ref(runner)
    gc.disable()
    try:
        del runner
        assert freed() is None
    finally:
        gc.enable()


def test_a_batch_with_more_states_than_a_graph_holds_runs_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_module, "SPLIT", 32)
    monkeypatch.setattr(graphs_module, "MOST_STATES", 3)
    graphs = StepGraphs(FakeStore(), [AttentionWindow()], TritonSampler(), 9, is_exact=True)

    def compute(tokens: torch.Tensor, positions: Any, keep: Any, attention: Any) -> torch.Tensor:
        layers = attention._layers(0, 4)
        attention._lists.setdefault(layers, attention._make_lists(layers))
        return logits_of_nothing(tokens, positions, keep, attention)

    graphs.capture(compute, lambda compute: (compute(), compute)[1], GraphLimits(rows=2, tokens=0), lambda: 0)
    for end, is_found in ((40, True), (130, False)):
        row = Row(Request("a", (1,)), [1] * end, end - 1, end, (array("i", [0] * 9),), True)
        assert (graphs.find([row]) is not None) == is_found
    chunk = Row(Request("a", (1,)), [1] * 9, 0, 9, (array("i", [0]),), True)
    assert graphs.find([chunk]) is None


class FakeCuda:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current: list[Any] = ["default"]
        self.streams = 0
        self.captured_on: list[Any] = []
        self.fails = False
        for name in ("stream", "graph", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", self.make_stream)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))

    def make_stream(self, device: torch.device, priority: int) -> Any:
        self.streams += 1
        assert priority == -1, "decodes go before the prompts of another engine"
        return SimpleNamespace(wait_stream=lambda other: None)

    def current_stream(self, device: torch.device) -> Any:
        return SimpleNamespace(wait_stream=lambda other: None)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before = list(self.current)
        self.current.append(stream)
        try:
            yield
        finally:
            self.current[:] = before

    @contextmanager
    def graph(self, graph: Any, pool: Any, stream: Any) -> Iterator[None]:
        """Capture as torch does: after a failure the stream is left current."""
        self.current.append(stream)
        self.captured_on.append(stream)
        yield
        if self.fails:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.current.pop()


def test_graphs_are_captured_on_one_stream_which_a_failure_does_not_leave_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cuBLAS keeps a workspace for each stream."""
    cuda = FakeCuda(monkeypatch)
    capture, computed_on = Capture(DEVICE), list[Any]()

    def compute() -> StepOutput:
        computed_on.append(cuda.current[-1])
        return StepOutput(*torch.zeros(3, 1))

    for _ in range(3):
        capture(compute)
    assert cuda.streams == 1
    assert len(computed_on) == 6
    assert {id(stream) for stream in (*computed_on, *cuda.captured_on)} == {id(cuda.captured_on[0])}
    cuda.fails = True
    with pytest.raises(RuntimeError, match="during capture"):
        capture(compute)
    assert cuda.current == ["default"]
