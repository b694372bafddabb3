"""Checkpoints of safetensors only; code of a repository is never run."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.import_utils import is_accelerate_available

from decant.engine.checkpoint import model_types, weight_files
from decant.engine.checkpoint.coded_linear import check_replaced, is_plain_linear, placeholder, replace_placeholders
from decant.engine.checkpoint.context_length import default_length, max_positions
from decant.engine.checkpoint.expert_layers import CodedExperts, find_coded, replace_experts
from decant.engine.checkpoint.formats import find_format
from decant.engine.checkpoint.weight import Weight
from decant.engine.checkpoint.weight_format import PLAIN, Slice, WeightFormat
from decant.engine.checkpoint.weight_hash import Digests, digest_files
from decant.engine.checkpoint.weight_shapes import CONSTANTS, predicting
from decant.engine.errors import InvalidConfig, ModelRefused
from decant.engine.kv_layout import KvLayout
from decant.engine.library_errors import refuse_model_on_error

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Configuration of a model whose weights are not read yet. ``revision`` is the commit of a hub name."""

    path: str
    revision: str | None
    config: PreTrainedConfig
    weight_format: WeightFormat = PLAIN

    @property
    def name(self) -> str:
        architectures = self.config.architectures or [self.config.model_type]
        return f"{architectures[0]} ({self.path})"

    def choose_dtype(self, name: str, fast: Set[torch.dtype]) -> torch.dtype:
        stored = self.config.get_text_config().dtype or self.config.dtype or "float32"
        named = str(stored).removeprefix("torch.") if name == "auto" else name
        if named not in DTYPES:
            raise InvalidConfig("dtype", f"one of {', '.join(DTYPES)}; the checkpoint has another", named)
        dtype = DTYPES[named]
        if dtype not in fast:
            if name == "auto":
                return torch.bfloat16
            raise InvalidConfig("dtype", "bfloat16 or float32 on a CPU, which has no fast float16", name)
        return dtype

    def choose_context_length(self, context_length: int | None) -> int:
        text = self.config.get_text_config()
        most = getattr(text, "max_position_embeddings", None)
        if most is None:
            if context_length is None:
                raise ModelRefused(self.name, "it names no max_position_embeddings; give a context length")
            return context_length
        positions = max_positions(text, most)
        if context_length is not None and context_length > positions:
            raise InvalidConfig("context_length", f"at most the checkpoint's {positions} positions", context_length)
        return context_length or default_length(text, most)

    def read(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        load_to_device: bool = False,
        keep_codes: bool = False,
    ) -> PreTrainedModel:
        """Load the weights into transformers' causal model, without towers of other media. Raises ModelRefused.

        With ``keep_codes``, linear layers with a quantized weight and those of ``ExpertLayers`` are a ``CodedLinear``,
        whose weight is not read yet, and embeddings a ``CodedEmbedding``. Other quantized weights are dequantized.

        With ``load_to_device``, if accelerate is installed and there are no such towers, each tensor goes to the device
        as it is read, unless some stay quantized. Else the model is in the host's memory first, as mapped files or as a
        copy in another dtype.
        """
        with refuse_model_on_error(self.name, "transformers can't load it"):
            model_class, source, coded, experts = self._source(dtype, keep_codes)
            is_placed = load_to_device and is_accelerate_available() and not _other_media(self.config)
            is_placed = is_placed and not coded and not experts
            placed: dict[str, Any] = {"device_map": {"": device}} if is_placed else {}
            loaded: Any = model_class.from_pretrained(
                **source,
                **placed,
                config=self.config,
                dtype=dtype,
                attn_implementation="eager",
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        model: PreTrainedModel = loaded[0]
        missing = sorted(loaded[1]["missing_keys"])
        if missing:  # transformers would use random numbers
            untied = missing == ["lm_head.weight"]
            advice = "; if it shares the embedding's, set tie_word_embeddings to true in config.json" if untied else ""
            raise ModelRefused(self.name, f"it lacks {len(missing)} of its weights, {missing[0]} among them{advice}")
        if surplus := _surplus(loaded[1]["unexpected_keys"], self.config.get_text_config()):
            reason = f"it has {len(surplus)} weights that the model does not use, {surplus[0]} among them"
            raise ModelRefused(self.name, reason)
        folder = Path(self.path)
        if self.revision is not None:  # only now are a hub's weight files here
            # From the cache: for a listing of that commit, the hub's client would repeat a failed request for 24 s.
            folder = _fetch_small(self.path, self.revision, local_files_only=True)
            weight_files.check_weights(folder, weight_files.read_config(folder))
        with refuse_model_on_error(self.name, "its quantized weights do not fit it"):
            replace_placeholders(model, coded, dtype)
            replace_experts(model, experts, dtype)
            check_replaced(model)
        _drop_other_media(model)
        with refuse_model_on_error(self.name, f"its weights can't be put on {device}"):
            torch.nn.Module.to(model, device)
        model.eval()
        return model

    def make(self, device: torch.device) -> PreTrainedModel:
        """Make the model of ``read`` without its weights, whose numbers are undefined. Raises ModelRefused."""
        with refuse_model_on_error(self.name, "transformers can't make it"), device:
            model: PreTrainedModel = _auto_class(self.config).from_config(
                self.config, attn_implementation="eager", experts_implementation="batched_mm", trust_remote_code=False
            )
        _drop_other_media(model)
        model.eval()
        return model

    def _source(
        self, dtype: torch.dtype, keep_codes: bool
    ) -> tuple[Any, dict[str, Any], dict[str, Weight], dict[str, CodedExperts]]:
        """Return a class, where it loads its weights from, and what it gets placeholders for: layers, and experts."""
        auto = _auto_class(self.config)
        if self.weight_format is PLAIN:
            return auto, {"pretrained_model_name_or_path": self.path, "revision": self.revision}, {}, {}
        folder = self._download()
        files = weight_files.weight_files(folder, weight_files.read_config(folder))
        model_class = auto._model_mapping[type(self.config)]  # the auto class needs a path
        slices = dict(self.weight_format.open(files) or {})
        coded, experts = self._coded(slices) if keep_codes else ({}, {})
        slices |= {weight.name: placeholder(weight.shape, dtype) for weight in coded.values()}
        for each in experts.values():
            slices = {name: tensor for name, tensor in slices.items() if name not in each.names}
            slices |= {name: placeholder(shape, dtype) for name, shape in each.tensors.items()}
        return model_class, {"pretrained_model_name_or_path": None, "state_dict": slices}, coded, experts

    def _coded(self, slices: Mapping[str, Slice]) -> tuple[dict[str, Weight], dict[str, CodedExperts]]:
        """Return quantized weights of linear layers and embeddings, by their names in the model, and of experts."""
        made = self.make(torch.device("meta"))
        named = made.named_modules()
        layers = [name for name, each in named if is_plain_linear(each) or type(each) is torch.nn.Embedding]
        found = {layer: slices.get(f"{layer}.weight") for layer in layers}
        coded = {layer: weight for layer, weight in found.items() if isinstance(weight, Weight)}
        coded |= _tied_head(made, coded, slices)
        return coded, dict(find_coded(made, slices))

    def _download(self) -> Path:
        if self.revision is None:
            return Path(self.path)
        patterns = ["*.json", "*.safetensors"]
        return Path(snapshot_download(self.path, revision=self.revision, allow_patterns=patterns))

    def weights(self) -> Digests:
        """Identity of the weights; reads a folder's files whose digests are not cached. Raises ModelRefused."""
        if self.revision is not None:
            return Digests((f"{self.path}@{self.revision}",), {})
        folder = Path(self.path)
        files = weight_files.weight_files(folder, weight_files.read_config(folder))
        with refuse_model_on_error(self.name, "its weights can't be read"):
            return digest_files([folder / "config.json", *files])


def _tied_head(model: PreTrainedModel, coded: Mapping[str, Weight], slices: Mapping[str, Slice]) -> dict[str, Weight]:
    """Return the weight of a head that has none of its own and shares that of a quantized embedding."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    if head is None or f"{names[head]}.weight" in slices or names.get(embedding) not in coded:
        return {}
    if head.weight is not embedding.weight:
        return {}
    return {names[head]: coded[names[embedding]]}


def open(path: str, revision: str | None = None) -> Checkpoint:
    """Read and check the configuration of a folder or hub name. Raises ModelRefused."""
    local = Path(path).exists()
    if local:
        weight_files.check(Path(path))
    with refuse_model_on_error(
        path, "its configuration can't be read" if local else "no folder, and no hub name within reach"
    ):
        folder = Path(path) if local else _fetch_small(path, revision)
        revision = None if local else folder.name  # later reads use that commit
    if not local:
        weight_files.check_adapters(folder, path)
    with refuse_model_on_error(path, "its configuration can't be read"):
        raw, _ = PreTrainedConfig.get_config_dict(path, revision=revision)
    if not local:
        _check_type(path, raw)
        weight_files.check_format(folder, raw)
    return _configured(path, path, revision, raw)


def open_config(file: Path, name: str) -> Checkpoint:
    """Read and check a config.json, whose weights may be elsewhere. Those beside it are checked if ``name`` is their
    folder. Raises ModelRefused.
    """
    raw = weight_files.read_json(file, name)
    if name == str(file.parent) and weight_files.has_weights(file.parent):
        weight_files.check(file.parent)
    else:
        _check_type(name, raw)
        weight_files.check_format(file.parent, raw)
    return _configured(str(file), name, None, raw)


def _check_type(name: str, raw: Mapping[str, Any]) -> None:
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise model_types.refusal(name, raw)


def _configured(source: str, path: str, revision: str | None, raw: Mapping[str, Any]) -> Checkpoint:
    _check_type(path, raw)
    kind = raw["model_type"]
    with refuse_model_on_error(f"{kind} ({path})", "its configuration is not one of that type"):
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    if config.is_encoder_decoder:
        raise ModelRefused(f"{kind} ({path})", "it is an encoder with a decoder; only decoders alone are served")
    weight_format = find_format(f"{kind} ({path})", raw)
    if weight_format is not PLAIN:  # transformers would look for its own implementation
        with suppress(AttributeError):
            del config.quantization_config
    return Checkpoint(path, revision, config, weight_format)


def _fetch_small(name: str, revision: str | None, *, local_files_only: bool = False) -> Path:
    patterns = ["config.json", "adapter_config.json"]
    return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=local_files_only))


def _auto_class(config: PreTrainedConfig) -> Any:
    """Choose the multimodal class if it saved the checkpoint: the text class would report surplus weights."""
    multimodal: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM if multimodal is None else AutoModelForImageTextToText
    saved = getattr(multimodal, "__name__", None) in (config.architectures or ())
    return AutoModelForImageTextToText if saved else AutoModelForCausalLM


def _surplus(unexpected: Iterable[str], text: PreTrainedConfig) -> list[str]:
    further = predicting(getattr(text, "num_hidden_layers", 0), getattr(text, "num_nextn_predict_layers", None))
    return sorted(
        name
        for name in unexpected
        if not name.endswith(CONSTANTS) and not ((layer := _LAYER.search(name)) and int(layer.group(1)) in further)
    )


def _other_media(config: PreTrainedConfig) -> set[int]:
    text = config.get_text_config()
    if text is config:
        return set()
    others = [getattr(config, name, None) for name in config.sub_configs]
    return {id(other) for other in others if other is not None and other is not text}


def _drop_other_media(model: PreTrainedModel) -> None:
    others = _other_media(model.config)
    for parent in list(model.modules()) if others else ():
        for name, child in list(parent.named_children()):
            if isinstance(child, PreTrainedModel) and id(child.config) in others:
                setattr(parent, name, torch.nn.Identity())


def layout_hash(weights: Digests, layout: KvLayout, context_length: int, dtypes: str, backend: tuple[str, str]) -> str:
    """``dtypes`` names the dtype, the weights that are codes in memory, and how keys are stored."""
    facts = [
        str(layout),
        str(context_length),
        dtypes,
        *backend,
        torch.__version__,
        transformers.__version__,
    ]
    digest = hashlib.blake2b(digest_size=8)
    for fact in (*facts, *weights.values):
        digest.update(fact.encode() + b"\0")
    return digest.hexdigest()
