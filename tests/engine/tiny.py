from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from decant.engine.engine import Engine
from decant.engine.output import StepOutput
from decant.engine.request import Request, StopParams
from tests.engine import tiny_configs
from tests.engine.tiny_configs import BASE, SERVED, VOCAB

CONTEXT_LENGTH = tiny_configs.CONTEXT_LENGTH


def config(name: str, **changes: Any) -> PreTrainedConfig:
    """Configuration of an entry of SERVED or of a model type; a change to ``...`` leaves an entry out."""
    kind, own = SERVED.get(name, (name, {}))
    base = {} if "text_config" in own else BASE
    entries = {**base, **own, **changes}
    return AutoConfig.for_model(kind, **{name: value for name, value in entries.items() if value is not ...})


def _auto_class(made: PreTrainedConfig) -> Any:
    return AutoModelForCausalLM if made.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else AutoModelForImageTextToText


def kinds() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def save(made: PreTrainedConfig, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(seed)
    model = _auto_class(made).from_config(made, attn_implementation="eager", dtype=torch.float32)
    scale_weights(model, seed)
    model.generation_config = GenerationConfig(eos_token_id=made.get_text_config().eos_token_id)
    model.to(dtype).save_pretrained(folder)
    return folder


def save_large(made: PreTrainedConfig, folder: Path) -> Path:
    """Save a model in bfloat16 whose weights repeat a million numbers, each row from another on.

    They are drawn in a tenth of the time.
    """
    with no_init_weights():
        model = _auto_class(made).from_config(made, dtype=torch.bfloat16)
    model.tie_weights()
    drawn = (torch.randn(1_000_003, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            repeated = drawn.repeat(-(-weight.numel() // len(drawn)))[: weight.numel()].view_as(weight)
            weight.copy_(1 + repeated if "norm" in name else repeated)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def scale_weights(model: PreTrainedModel, seed: int = 0) -> None:
    """Draw weights that keep each layer's output as large as its input, and logits of spread 1: with a fresh model's
    small weights a wrong attention would go unnoticed.

    A tied table is drawn small and the last norm large; otherwise the likeliest next token is the last one again.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() >= 2:
            parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
        else:
            parameter.add_(0.1 * noise)
    tokens = torch.randint(_vocabulary(model), (1, 48), generator=generator)
    head: Any = model.get_output_embeddings()
    if head is None:
        return
    if head.weight is model.get_input_embeddings().weight:
        _last_norm(model, tokens).weight.add_(40.0)
    for _ in range(6):  # more than once: a tied head is the input's table too, and logits may be capped
        found = spread(model, tokens)
        head.weight.mul_(1.0 / found)
        if abs(found - 1.0) < 1e-4:
            break


def _last_norm(model: PreTrainedModel, tokens: torch.Tensor) -> Any:
    called: list[nn.Module] = []
    norms = [m for m in model.modules() if isinstance(w := getattr(m, "weight", None), torch.Tensor) and w.dim() == 1]
    hooks = [norm.register_forward_hook(lambda module, *_: called.append(module)) for norm in norms]
    spread(model, tokens)
    for hook in hooks:
        hook.remove()
    return called[-1]


def spread(model: PreTrainedModel, tokens: torch.Tensor) -> float:
    evaluated: Any = model.eval()
    with torch.no_grad():
        return float(evaluated(input_ids=tokens, use_cache=False).logits.std().clamp(min=1e-6))


def _vocabulary(model: PreTrainedModel) -> int:
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, nn.Embedding)
    return embeddings.num_embeddings


def prompt(length: int, seed: int, vocabulary: int = VOCAB - 8) -> tuple[int, ...]:
    """Random tokens; with one ``seed``, shorter prompts are prefixes of longer ones."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(vocabulary, (1024,), generator=generator)[:length].tolist())


@dataclass(frozen=True)
class Written:
    """Tokens, and the margin of the best over the second best at each."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...]


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    kind = _auto_class(AutoConfig.from_pretrained(folder))
    model: PreTrainedModel = kind.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    model.eval()
    model.generation_config = GenerationConfig()
    return model


@torch.no_grad()
def generate(model: Any, tokens: Sequence[int], count: int) -> Written:
    out = model.generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
        do_sample=False,
        max_new_tokens=count,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(out.logits)[:, 0].float().topk(2).values
    return Written(tuple(out.sequences[0, len(tokens) :].tolist()), tuple((best[:, 0] - best[:, 1]).tolist()))


@torch.no_grad()
def follow(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Written:
    """Choose at each position what ``generate`` would after ``prompt`` and the earlier ``tokens``, in one pass.

    Up to the first other token the choices are those of ``generate``.
    """
    sequence = torch.tensor([[*prompt, *tokens]])[:, :-1]
    best = model(input_ids=sequence, use_cache=False).logits[0, len(prompt) - 1 :].float().topk(2)
    return Written(tuple(best.indices[:, 0].tolist()), tuple((best.values[:, 0] - best.values[:, 1]).tolist()))


@dataclass
class Run:
    tokens: dict[str, list[int]]
    reasons: dict[str, str]
    steps: list[StepOutput]


def greedy(id: str, tokens: Sequence[int], count: int, **options: Any) -> Request:
    return Request(id, tuple(tokens), stop=StopParams(max_tokens=count, ignore_eos=True), **options)


def run(engine: Engine, requests: Sequence[Request], *, cancel: Mapping[int, str] | None = None) -> Run:
    """Run requests to their ends and check the pool; ``cancel`` maps a step to the id to cancel before it."""
    done = Run({request.id: [] for request in requests}, {}, [])
    for request in requests:
        engine.add(request)
    for step in itertools.count():
        if cancel and step in cancel:
            assert engine.cancel(cancel[step])
        if not engine.has_work:
            break
        output = engine.step()
        done.steps.append(output)
        for token in output.tokens:
            done.tokens[token.id].append(token.token)
        for ended in output.ended:
            done.reasons[ended.id] = ended.reason.value
        assert step < 20_000, "the engine does not come to an end"
    engine.check_integrity()
    return done
