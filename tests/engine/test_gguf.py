"""GGUF files: what their weights are, what a model of them computes, and which files are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM

from decant.engine.checkpoint import checkpoint as checkpoints
from decant.engine.checkpoint import ggml_blocks, weight_files
from decant.engine.checkpoint.coded_embedding import CodedEmbedding
from decant.engine.checkpoint.coded_linear import CodedLinear
from decant.engine.checkpoint.weight import CodeKind, Weight
from decant.engine.engine import Engine
from decant.engine.errors import ModelRefused
from decant.engine.model.model import ModelDevice
from decant.engine.scheduler import Limits
from decant.runtime.model_files import local_folder
from tests import gguf_files
from tests.engine import tiny
from tests.engine.served import serve
from tests.gguf_files import GgufFile

CODED = {
    Type.Q8_0: CodeKind.INT8,
    Type.Q5_0: CodeKind.INT8,
    Type.Q5_1: CodeKind.INT8,
    Type.Q5_K: CodeKind.INT8,
    Type.Q6_K: CodeKind.INT8,
    Type.Q4_0: CodeKind.INT4,
    Type.Q4_1: CodeKind.INT4,
    Type.Q4_K: CodeKind.INT4,
}
every_type = pytest.mark.parametrize("kind", CODED, ids=lambda kind: kind.name)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def q4_k_m(name: str) -> Type:
    return Type.Q6_K if name.startswith("token_embd") or "ffn_down" in name else Type.Q4_K


def every_kind(name: str) -> Type:
    """A type for each matrix of a layer, all of ``CODED`` in a model."""
    parts = ("attn_q.", "attn_k.", "attn_v.", "attn_output.", "ffn_gate.", "ffn_up.", "ffn_down.", "output.")
    return next((kind for part, kind in zip(parts, CODED, strict=True) if part in name), Type.Q8_0)


def checkpoint(folder: Path, architecture: str = "llama", **changes: Any) -> Path:
    """A model whose rows are whole blocks of each type."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 256}
    head_dim = {"llama": 64, "qwen2": ..., "qwen3": 128}[
        architecture
    ]  # transformers reads qwen3's as 128 from any file
    return tiny.save(tiny.config(architecture, **{**sizes, "head_dim": head_dim, **changes}), folder / architecture)


def written(file: GgufFile, folder: Path) -> Path:
    return file.write(folder / "model-q.gguf")


def folder_of(path: Path) -> Path:
    folder = local_folder(str(path))
    assert folder is not None
    return folder


def opened(path: Path) -> dict[str, Any]:
    folder = folder_of(path)
    weight_files.check(folder)
    return dict(checkpoints.open(str(folder)).weight_format.open([folder / "model.gguf"]) or {})


def plain(path: Path) -> Any:
    """The model as transformers reads the same file."""
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def generated(device: ModelDevice, count: int = 12) -> list[int]:
    engine = Engine(device, Limits(context_length=64))
    return tiny.run(engine, [tiny.greedy("r", [5, 6, 7, 8], count)]).tokens["r"]


@pytest.mark.parametrize("decoded", [1, 1 << 20], ids=["a row at a time", "at once"])
@every_type
def test_a_weight_is_exactly_what_the_gguf_package_reads(
    kind: Type, decoded: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ggml_blocks, "_DECODED_BYTES", decoded)
    file = gguf_files.of_folder(checkpoint(tmp_path, "qwen3"), kind)
    found = opened(written(file, tmp_path))
    assert len(found) == len(file.tensors)
    for stored, name in (
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output.weight", "lm_head.weight"),
    ):
        weight = found[name]
        assert isinstance(weight, Weight)
        codes = weight.codes()
        assert codes.kind is CODED[kind]
        assert torch.equal(codes.dequantize(torch.float32), file.weight(stored))
        assert torch.equal(codes.dequantize(torch.float64).float(), file.weight(stored))
        assert torch.equal(weight[:], file.weight(stored))
        assert weight.nbytes == file.tensors[stored][0].nbytes


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16], ids=lambda kind: kind.name)
def test_a_plain_tensor_is_exactly_what_the_gguf_package_reads(kind: Type, tmp_path: Path) -> None:
    file = gguf_files.of_folder(checkpoint(tmp_path, "qwen3"), kind)
    found = opened(written(file, tmp_path))
    assert not any(isinstance(each, Weight) for each in found.values())
    assert torch.equal(found["model.layers.0.mlp.up_proj.weight"][:].float(), file.weight("blk.0.ffn_up.weight"))
    assert torch.equal(found["model.norm.weight"][:], file.weight("output_norm.weight"))


@every_type
def test_blocks_with_a_scale_of_zero_are_zeros(kind: Type, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "qwen3")
    file = gguf_files.of_folder(folder, kind)
    numbers, _ = file.tensors["blk.0.ffn_up.weight"]
    numbers[3] = 0
    codes = opened(written(file, tmp_path))["model.layers.0.mlp.up_proj.weight"].codes()
    found = codes.dequantize(torch.float64)
    assert not found[3].any()
    assert torch.equal(found.float(), file.weight("blk.0.ffn_up.weight"))


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("llama", every_kind), ("qwen2", q4_k_m), ("qwen3", every_kind), ("llama", Type.F16)],
    ids=lambda each: each if isinstance(each, str) else getattr(each, "name", None) or each.__name__,
)
def test_a_model_computes_what_transformers_computes_of_the_same_file(
    architecture: str, kind: Any, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path, architecture, tie_word_embeddings=kind is q4_k_m)
    path = written(gguf_files.of_folder(folder, kind), tmp_path)
    expected = plain(path)
    tokens = [5, 6, 7, 8, 200, 31, 31, 4]
    read: Any = checkpoints.open(str(folder_of(path))).read(torch.float32, torch.device("cpu"), keep_codes=True)
    logits = [model(input_ids=torch.tensor([tokens]), use_cache=False).logits for model in (read, expected)]
    assert torch.allclose(logits[0], logits[1], rtol=1e-4, atol=1e-4 * float(logits[1].abs().max()))
    device = serve(folder_of(path), dtype="float32")
    assert device.probe_result.exact
    assert device.equal_bits
    text = expected.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert generated(device) == text[0, 4:].tolist()


def test_a_quantized_head_that_is_the_embedding_stays_quantized(tmp_path: Path) -> None:
    path = written(gguf_files.of_folder(checkpoint(tmp_path, tie_word_embeddings=True), Type.Q8_0), tmp_path)
    read: Any = checkpoints.open(str(folder_of(path))).read(torch.bfloat16, torch.device("cpu"), keep_codes=True)
    assert isinstance(read.get_output_embeddings(), CodedLinear)
    embedding = read.get_input_embeddings()
    assert isinstance(embedding, CodedEmbedding)
    rows = embedding(torch.arange(embedding.num_embeddings))
    assert torch.equal(read.get_output_embeddings().source[:].bfloat16(), rows)


def test_a_plain_head_that_is_the_embedding_is_the_embedding(tmp_path: Path) -> None:
    path = written(gguf_files.of_folder(checkpoint(tmp_path, tie_word_embeddings=True), Type.BF16), tmp_path)
    read: Any = checkpoints.open(str(folder_of(path))).read(torch.bfloat16, torch.device("cpu"), keep_codes=True)
    assert read.get_output_embeddings().weight is read.get_input_embeddings().weight


def test_layout_hashes_differ_by_the_weights_and_not_by_the_name_of_the_file(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    one = gguf_files.of_folder(folder, Type.Q8_0).write(tmp_path / "one.gguf")
    same = gguf_files.of_folder(folder, Type.Q8_0).write(tmp_path / "same.gguf")
    other = gguf_files.of_folder(folder, Type.Q4_0).write(tmp_path / "other.gguf")
    hashes = [checkpoints.open(str(folder_of(path))).weights().values for path in (one, same, other)]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize(
    ("kind", "bad"), [(Type.Q8_0, 0), (Type.Q4_0, 0), (Type.Q4_K, 0), (Type.Q4_K, 2), (Type.Q6_K, 208)], ids=str
)
def test_a_scale_that_is_not_finite_is_refused_by_the_name_of_its_weight(kind: Type, bad: int, tmp_path: Path) -> None:
    file = gguf_files.of_folder(checkpoint(tmp_path, "qwen3"), kind)
    numbers, _ = file.tensors["blk.0.ffn_up.weight"]
    numbers[1, bad : bad + 2] = 0x7E
    with pytest.raises(ModelRefused, match=r"layers\.0\.mlp\.up_proj\.weight: a (scale|minimum) is"):
        serve(folder_of(written(file, tmp_path)))


def test_a_weight_of_another_shape_is_refused_by_its_name(tmp_path: Path) -> None:
    file = gguf_files.of_folder(checkpoint(tmp_path, "qwen3"), Type.Q8_0)
    numbers, kind = file.tensors["blk.0.ffn_up.weight"]
    file.tensors["blk.0.ffn_up.weight"] = numbers[:-2], kind
    with pytest.raises(ModelRefused, match=r"layers\.0\.mlp\.up_proj\.weight in model\.gguf is \[254, 256\]"):
        serve(folder_of(written(file, tmp_path)))


def test_a_file_that_is_cut_after_its_folder_was_made_is_refused(tmp_path: Path) -> None:
    path = written(gguf_files.of_folder(checkpoint(tmp_path, "qwen3"), Type.Q8_0), tmp_path)
    folder = folder_of(path)
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(ModelRefused, match=r"model\.gguf can't be read"):
        serve(folder)
    path.unlink()
    with pytest.raises(ModelRefused, match=r"model\.gguf is a link to is missing"):
        serve(folder)
