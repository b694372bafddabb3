import json
from pathlib import Path

import pytest

from bench import workloads
from bench.engine import items_of
from bench.workloads import GENERATORS, InvalidWorkload, Item

GOOD = {"id": "a", "prompt_token_ids": [1, 2], "output_len": 3, "arrival_s": 0.5}


@pytest.mark.parametrize("name", list(GENERATORS))
def test_a_file_carries_a_workload_unchanged(name: str, tmp_path: Path) -> None:
    items = GENERATORS[name](512, 1)
    workloads.write(items, tmp_path / "w.jsonl")
    assert workloads.read(tmp_path / "w.jsonl") == items


@pytest.mark.parametrize("name", list(GENERATORS))
def test_the_same_seed_gives_the_same_workload(name: str) -> None:
    assert GENERATORS[name](512, 7) == GENERATORS[name](512, 7) != GENERATORS[name](512, 8)


def test_exponential_outputs_are_cut_and_of_the_right_mean() -> None:
    lengths = [item.output_len for item in workloads.exponential(512, count=4000, prompt=1)]
    assert min(lengths) >= 1
    assert max(lengths) <= 256
    # of Exp(64) below 256: 64 - 256 / (e^4 - 1) = 59.2, half a token more by rounding up
    assert abs(sum(lengths) / len(lengths) - 59.7) < 3


def test_long_prompts_and_mixed_have_their_lengths() -> None:
    assert all(1500 <= len(item.prompt_token_ids) <= 2000 for item in workloads.long_prompts(512))
    *running, late = workloads.mixed(512)
    assert len(running) == 8
    assert (len(late.prompt_token_ids), late.arrival_s > 0) == (3000, True)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"id": ""}, "id"),
        ({"id": 7}, "id"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [1, -1]}, "prompt_token_ids"),
        ({"prompt_token_ids": [True]}, "prompt_token_ids"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids"),
        ({"output_len": 0}, "output_len"),
        ({"output_len": 1.5}, "output_len"),
        ({"arrival_s": -1}, "arrival_s"),
        ({"arrival_s": float("nan")}, "arrival_s"),
        ({"arrival_s": "soon"}, "arrival_s"),
        ({"temperature": 1}, "temperature"),
    ],
)
def test_a_bad_field_is_named(change: dict[str, object], field: str, tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{json.dumps({**GOOD, 'id': 'b', **change})}\n")
    with pytest.raises(InvalidWorkload) as caught:
        workloads.read(path)
    assert (caught.value.line, caught.value.field) == (3, field)
    assert caught.value.limit in str(caught.value)


@pytest.mark.parametrize("field", list(GOOD))
def test_a_missing_field_is_named(field: str, tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(json.dumps({name: value for name, value in GOOD.items() if name != field}))
    with pytest.raises(InvalidWorkload, match=f"line 1: {field}: present"):
        workloads.read(path)


@pytest.mark.parametrize("text", ["", "\n", "{", "[]", f"{json.dumps(GOOD)}\n{json.dumps(GOOD)}"])
def test_an_invalid_workload_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidWorkload):
        workloads.read(path)


@pytest.mark.parametrize(
    ("item", "field", "value"),
    [(Item("a", [511, 512], 1, 0.0), "prompt_token_ids", 512), (Item("a", [1] * 60, 5, 0.0), "output_len", 65)],
)
def test_a_model_too_small_for_the_workload_is_refused(item: Item, field: str, value: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 512, "max_position_embeddings": 64}))
    workloads.write([item], tmp_path / "w.jsonl")
    with pytest.raises(InvalidWorkload) as caught:
        items_of(str(tmp_path / "w.jsonl"), tmp_path, 0)
    assert (caught.value.field, caught.value.value) == (field, value)
