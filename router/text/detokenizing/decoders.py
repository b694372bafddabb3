"""Decoders of the library as their descriptions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers import models as kinds
from tokenizers.decoders import Decoder

from decant.router.text.detokenizing.token_table import UnsupportedDecoder


def described(decoder: Decoder | None) -> Any:
    bare = Tokenizer(kinds.BPE())
    if decoder is not None:
        bare.decoder = decoder
    return json.loads(bare.to_str())["decoder"]


def decoder_of(steps: Sequence[Mapping[str, Any]]) -> Decoder:
    described = json.loads(Tokenizer(kinds.BPE()).to_str())
    described["decoder"] = {"type": "Sequence", "decoders": [*steps, {"type": "Fuse"}]}
    decoder: Decoder = Tokenizer.from_str(json.dumps(described)).decoder
    return decoder


def num_stripped(steps: Sequence[Mapping[str, Any]]) -> int:
    stripped = 0
    for step in steps:
        if step["type"] != "Strip" or step["content"] != " " or step["stop"]:
            raise UnsupportedDecoder(f"a decoder with {step['type']} after Fuse can't be followed token by token")
        stripped += step["start"]
    return stripped
