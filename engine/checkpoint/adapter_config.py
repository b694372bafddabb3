"""Configuration of an adapter as PEFT writes it (adapter_config.json). Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import regex

from decant.engine.errors import AdapterRefused

MAX_RANK = 512
"""Largest rank that is served."""

MATCH_SECONDS = 1.0
"""Longest match of one pattern with one name: a pattern of the folder may take exponential time."""

_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "fan_in_fan_out",
    "inference_mode", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "task_type",
}  # fmt: skip
"""Settings of training, or ones that only change what another setting does."""

_READ = {
    "alpha_pattern", "bias", "exclude_modules", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "lora_alpha", "modules_to_save", "peft_type", "r", "rank_pattern", "target_modules", "use_dora", "use_rslora",
}  # fmt: skip

_PLAIN_STARTS = {True, False, None, "eva", "gaussian", "orthogonal"}
"""``init_lora_weights`` that leave the base's weights as they are."""

_FIRST_INDEX = r".*?\.[^.]*\.(?P<layer>\d+)\."


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Which modules an adapter changes, with which rank and scaling.

    targets and excluded  a pattern of whole module names, or names and their ends; ``layers``: only those numbers
    ranks, alphas         by pattern; else ``rank`` and ``alpha``
    """

    name: str
    base: str
    rank: int
    alpha: float
    is_rank_stabilized: bool
    targets: str | tuple[str, ...]
    excluded: str | tuple[str, ...] = ()
    layers: frozenset[int] | None = None
    layers_patterns: tuple[str, ...] = ()
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)

    def changes(self, module: str) -> bool:
        """Whether the module is a target. Raises AdapterRefused for a pattern that can't be matched."""
        if self._is_listed(self.excluded, module) or not self._is_listed(self.targets, module):
            return False
        if self.layers is None or isinstance(self.targets, str) or module in self.targets:
            return True
        patterns = [rf"(?:^|.*?\.){pattern}\.(?P<layer>\d+)\." for pattern in self.layers_patterns] or [_FIRST_INDEX]
        found = next((match for pattern in patterns if (match := self._match(pattern, module))), None)
        return found is not None and found["layer"] is not None and int(found["layer"]) in self.layers

    def rank_of(self, module: str) -> int:
        return self.ranks.get(self._key(self.ranks, module), self.rank)

    def scaling_of(self, module: str) -> float:
        rank, alpha = self.rank_of(module), self.alphas.get(self._key(self.alphas, module), self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def _key(self, patterns: Iterable[str], module: str) -> str:
        matching = (pattern for pattern in patterns if self._match(rf"(.*\.)?({pattern})$", module))
        return next(matching, module)

    def _is_listed(self, listed: str | tuple[str, ...], module: str) -> bool:
        if isinstance(listed, str):
            return self._match(rf"(?:{listed})\Z", module) is not None
        return any(module == each or module.endswith(f".{each}") for each in listed)

    def _match(self, pattern: str, module: str) -> Any:
        try:
            return regex.match(pattern, module, timeout=MATCH_SECONDS)
        except TimeoutError:
            reason = f"the pattern {pattern[:80]!r} takes more than {MATCH_SECONDS:g} s for a name"
            raise AdapterRefused(self.name, reason) from None
        except (regex.error, RecursionError, ValueError) as error:
            raise AdapterRefused(self.name, f"{pattern[:80]!r} is no pattern: {error}") from None


def parse(name: str, raw: Mapping[str, Any]) -> AdapterConfig:
    """Check and convert the content of adapter_config.json. Raises AdapterRefused with what is not served."""
    reader = _Reader(name, raw)
    reader.check_served()
    layers = raw.get("layers_to_transform")
    return AdapterConfig(
        name=name,
        base=str(raw.get("base_model_name_or_path") or ""),
        rank=reader.rank("r", raw.get("r", 8)),
        alpha=reader.alpha("lora_alpha", raw.get("lora_alpha", 8)),
        is_rank_stabilized=reader.flag("use_rslora"),
        targets=reader.names("target_modules", is_needed=True),
        excluded=reader.names("exclude_modules"),
        layers=None if layers is None or layers == [] else reader.layers(layers),
        layers_patterns=reader.patterns("layers_pattern"),
        ranks={key: reader.rank(f"rank_pattern[{key}]", value) for key, value in reader.mapping("rank_pattern")},
        alphas={key: reader.alpha(f"alpha_pattern[{key}]", value) for key, value in reader.mapping("alpha_pattern")},
    )


class _Reader:
    def __init__(self, name: str, raw: Mapping[str, Any]) -> None:
        self._name, self._raw = name, raw

    def check_served(self) -> None:
        raw = self._raw
        if raw.get("peft_type") != "LORA":
            raise self._refused(f"its peft_type is {_short(raw.get('peft_type'))}, and only LORA is served")
        if self.flag("use_dora"):
            raise self._refused("it uses DoRA (use_dora), which is not served: merge it into the base model")
        if saved := raw.get("modules_to_save"):
            raise self._refused(f"it replaces whole modules (modules_to_save: {_short(saved)}), which is not served")
        if raw.get("bias", "none") != "none":
            raise self._refused(f"it changes biases (bias: {_short(raw['bias'])}), which is not served")
        start = raw.get("init_lora_weights", True)
        if not isinstance(start, str | bool | None) or start not in _PLAIN_STARTS:
            reason = f"its init_lora_weights is {_short(start)}, with which training changes the base's weights, too"
            raise self._refused(f"{reason}: convert it to a plain LoRA")
        others = sorted(key for key, value in raw.items() if value and key not in _WITHOUT_EFFECT | _READ)
        if others:
            raise self._refused(f"it sets {others[0]}, which is not served")

    def flag(self, key: str) -> bool:
        value = self._raw.get(key, False)
        if not isinstance(value, bool):
            raise self._invalid(key, "true or false", value)
        return value

    def rank(self, key: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANK:
            raise self._invalid(key, f"a whole number from 1 to {MAX_RANK}", value)
        return value

    def alpha(self, key: str, value: Any) -> float:
        try:
            alpha = math.nan if isinstance(value, bool | str) else float(value)
        except (TypeError, OverflowError):  # a whole number may have any length
            alpha = math.nan
        if not math.isfinite(alpha):
            raise self._invalid(key, "a finite number", value)
        return alpha

    def names(self, key: str, *, is_needed: bool = False) -> str | tuple[str, ...]:
        value = self._raw.get(key)
        if isinstance(value, str) and value:
            return value
        if value is None or value == "" or value == []:
            if is_needed:
                raise self._invalid(key, "module names or a pattern", value)
            return ()
        return self._strings(key, value)

    def patterns(self, key: str) -> tuple[str, ...]:
        value = self._raw.get(key) or ()
        return (value,) if isinstance(value, str) else self._strings(key, value)

    def layers(self, value: Any) -> frozenset[int]:
        numbers = value if isinstance(value, list) else [value]
        if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in numbers):
            raise self._invalid("layers_to_transform", "layer numbers", value)
        return frozenset(numbers)

    def mapping(self, key: str) -> Collection[tuple[str, Any]]:
        value = self._raw.get(key) or {}
        if not isinstance(value, dict):
            raise self._invalid(key, "an object", value)
        return value.items()

    def _strings(self, key: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list | tuple) or not all(isinstance(each, str) and each for each in value):
            raise self._invalid(key, "a list of names", value)
        return tuple(value)

    def _invalid(self, key: str, limit: str, value: object) -> AdapterRefused:
        return self._refused(f"{key} in adapter_config.json: {limit}, got {_short(value)}")

    def _refused(self, reason: str) -> AdapterRefused:
        return AdapterRefused(self._name, reason)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
