"""Every architecture that transformers knows: made small, and served or refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig

from decant.engine.checkpoint import model_types, weight_files
from decant.engine.engine import Engine
from decant.engine.errors import InvalidConfig, ModelRefused
from decant.engine.model.outline import ModelOutline, read_outline
from decant.engine.scheduler import Limits
from tests.engine import tiny, tiny_configs
from tests.engine.served import serve

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

SMALL: dict[str, Any] = {
    **tiny_configs.BASE,
    "d_model": 64,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_layers": 2,
    "n_heads": 4,
    "num_layers": 2,
    "num_heads": 4,
    "n_positions": 256,
    "ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "d_ff": 96,
    "d_kv": 16,
    "max_seq_len": 256,
    "max_sequence_length": 256,
    "n_ctx": 256,
    "n_inner": 96,
    "ffn_hidden_size": 96,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 48,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "sliding_window": 64,
    "rotary_dim": 8,
    "word_embed_proj_dim": 64,
    "embedding_size": 64,
    "embedding_dim": 64,
    "state_size": 16,
    "query_pre_attn_scalar": 16,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "mamba_d_state": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "is_decoder": True,
    "intermediate_size_mlp": 96,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "attention_chunk_size": 64,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": tiny_configs.VOCAB,
    "original_max_position_embeddings": 64,
    "mamba_d_ssm": 64,
    "mamba_n_groups": 1,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "L_cycles": 1,
}
MOST_WEIGHTS = 6_000_000
PROMPTS = [tiny.prompt(length, length, 300) for length in (3, 45, 100)]


def _configurations(kind: str) -> Iterator[Any]:
    default = AutoConfig.for_model(kind)
    known = {name: value for name, value in SMALL.items() if hasattr(default, name)}
    known.pop("tie_word_embeddings", None)
    if "qk_rope_head_dim" in known:
        known |= {"head_dim": 8, "num_key_value_heads": 4}
    special = {name: 1 for name in known if name.endswith("_token_id")}
    without_head = {name: value for name, value in known.items() if name != "head_dim"}
    attempts = [known, known | special, without_head, without_head | special]
    for changes in (changes for index, changes in enumerate(attempts) if changes not in attempts[:index]):
        yield lambda changes=changes: AutoConfig.for_model(kind, **changes)


@contextmanager
def _at_most(count: int) -> Iterator[None]:
    """Stop making a larger model at the first weight too many, before that weight is drawn."""
    total = 0

    def add(module: torch.nn.Module, name: str, weight: torch.nn.Parameter) -> None:
        nonlocal total
        total += weight.numel()
        if total > count:
            raise OverflowError(f"more than {count} weights")

    handle = register_module_parameter_registration_hook(add)
    try:
        yield
    finally:
        handle.remove()


def _small_checkpoint(kind: str, folder: Path) -> Path | None:
    try:
        attempts = list(_configurations(kind))
    except Exception:  # noqa: BLE001 - whatever transformers raises: this type can't be made here
        return None
    for attempt in attempts:
        try:
            with _at_most(MOST_WEIGHTS):
                return tiny.save(attempt(), folder)
        except Exception:  # noqa: BLE001 - the same: another attempt may be made
            continue
    return None


def _verdict(kind: str, folder: Path) -> str:
    made = _small_checkpoint(kind, folder)
    if made is None:
        return "not made"
    weight_files.check(made)  # a whole checkpoint: refused, if at all, for how it computes
    model_types.check(kind, weight_files.read_config(made))
    outline = _outline(made)
    try:
        device = serve(made, dtype="float32", context_length=tiny.CONTEXT_LENGTH, kv_bytes=2 << 20)
    except (ModelRefused, InvalidConfig):
        return "refused" if outline is None else "WRONG: not refused by its outline"
    model = tiny.reference(made)
    if outline is None or outline.layers != device.store.layout.layers:
        return f"WRONG: outlined with {outline} and served with {device.store.layout.layers}"
    engine = Engine(device, Limits(token_budget=19, max_running=19, context_length=tiny.CONTEXT_LENGTH))
    ours = tiny.run(engine, [tiny.greedy(str(index), tokens, 8) for index, tokens in enumerate(PROMPTS)])
    for index, tokens in enumerate(PROMPTS):
        written = ours.tokens[str(index)]
        # A later token of generate comes from its cache: the longest prompt is longer than any window.
        is_longest = index == len(PROMPTS) - 1
        theirs = tiny.generate(model, tokens, 8) if is_longest else tiny.follow(model, tokens, written)
        for one, other, margin in zip(written, theirs.tokens, theirs.margins, strict=True):
            if one != other and margin > 1e-4:
                return f"WRONG: prompt of {len(tokens)}, {one} for {other} by {margin:.2g}"
            if one != other:
                break
    return "served"


def _outline(folder: Path) -> ModelOutline | None:
    try:
        return read_outline(folder / "config.json", str(folder))
    except ModelRefused:
        return None


def test_a_model_that_answers_with_all_rows_is_sampled_from_the_right_ones(tmp_path):
    """Whisper's decoder ignores ``logits_to_keep``."""
    assert _verdict("whisper", tmp_path) == "served"


PARTS = 4
"""Of the architectures, so that several processes can share them."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_served_architecture_generates_the_tokens_of_generate(
    part: int, tmp_path: Path, record_testsuite_property: Callable[[str, object], None]
) -> None:
    verdicts: dict[str, str] = {}
    for kind in tiny.kinds()[part::PARTS]:
        folder = tmp_path / kind
        folder.mkdir()
        verdicts[kind] = _verdict(kind, folder)
        shutil.rmtree(folder)
    for outcome in ("served", "refused", "not made"):
        kinds = [kind for kind, verdict in verdicts.items() if verdict == outcome]
        record_testsuite_property(f"{outcome.replace(' ', '_')}_{part}", len(kinds))
        print(f"\n{len(kinds)} {outcome}: {' '.join(kinds)}")
    wrong = {kind: verdict for kind, verdict in verdicts.items() if verdict.startswith("WRONG")}
    assert not wrong
    assert sum(verdict == "served" for verdict in verdicts.values()) > 70 // PARTS
    assert sum(verdict == "refused" for verdict in verdicts.values()) > 30 // PARTS
