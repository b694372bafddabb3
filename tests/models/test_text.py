from __future__ import annotations

import ast

import pytest
import torch

from decant import models
from decant.models.card import SAMPLE_PROMPTS

pytestmark = pytest.mark.slow

TOLERANCE = 0.02  # nats per token
SMALLEST_MARGIN = 1e-3  # logits
SAMPLED, LENGTH = 4 * len(SAMPLE_PROMPTS), 150


def held_out_loss(model, tokenizer) -> float:
    text = (models.path() / "excerpt.txt").read_text(encoding="utf-8")
    ids = torch.tensor([[*tokenizer(text).input_ids, tokenizer.eos_token_id]])
    with torch.inference_mode():
        return float(model(ids, labels=ids).loss)


def test_loss_on_the_excerpt_is_the_recorded_one(model, tokenizer, figures):
    assert held_out_loss(model, tokenizer) == pytest.approx(figures["excerpt"]["nats_per_token"], abs=TOLERANCE)


def test_the_loss_tells_wrong_rotary_positions(model, tokenizer, figures):
    frequencies = model.model.rotary_emb.inv_freq
    frequencies.mul_(2)
    changed = held_out_loss(model, tokenizer)
    frequencies.div_(2)
    assert abs(changed - figures["excerpt"]["nats_per_token"]) > TOLERANCE


def test_five_greedy_continuations_are_as_recorded(model, tokenizer, figures):
    records = figures["greedy"]
    assert len(records) == 5
    for record in records:
        prompt = tokenizer(record["text"], return_tensors="pt")
        assert prompt.input_ids[0].tolist() == record["prompt"]
        out = model.generate(**prompt, do_sample=False, max_new_tokens=len(record["tokens"]))
        assert out[0, len(record["prompt"]) :].tolist() == record["tokens"]
        assert tokenizer.decode(record["tokens"]) == record["continuation"]


def test_no_recorded_continuation_hangs_on_rounding(model, figures):
    for record in figures["greedy"]:
        ids = torch.tensor([record["prompt"] + record["tokens"]])
        with torch.inference_mode():
            best = model(ids).logits[0, len(record["prompt"]) - 1 : -1].topk(2).values
        margin = (best[:, 0] - best[:, 1]).min().item()
        assert margin > SMALLEST_MARGIN
        assert margin == pytest.approx(record["margin"], abs=SMALLEST_MARGIN / 2)


def last_complete_line(text: str) -> str:
    return text[: text.rfind("\n") + 1]


def function_alone(source: str) -> str:
    header, *rest = source.splitlines(keepends=True)
    for number, line in enumerate(rest):
        if line.strip() and not line[0].isspace():
            return header + "".join(rest[:number])
    return source


def draw_functions(model, tokenizer, prompt: str, count: int) -> list[str]:
    torch.manual_seed(0)
    ids = tokenizer(prompt, return_tensors="pt")
    options = {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1.0}
    out = model.generate(**ids, **options, max_new_tokens=LENGTH, num_return_sequences=count)
    texts = tokenizer.batch_decode(out[:, ids.input_ids.size(1) :], skip_special_tokens=True)
    return [function_alone(prompt + last_complete_line(text)) for text in texts]


def parses(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True


def test_sampled_function_bodies_mostly_parse(model, tokenizer):
    good = 0
    for prompt in SAMPLE_PROMPTS:
        for source in draw_functions(model, tokenizer, prompt, SAMPLED // len(SAMPLE_PROMPTS)):
            # A docstring alone would parse too; the function needs a body to count.
            good += bool(source[len(prompt) :].strip()) and parses(source)
    assert good >= 0.6 * SAMPLED


def test_messages_are_refused_because_there_is_no_chat_template(tokenizer):
    assert tokenizer.chat_template is None
    with pytest.raises(ValueError, match="chat_template is not set"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
