"""The table of a tokenizer, by its decoder."""

from __future__ import annotations

from tokenizers import Tokenizer

from decant.router.text.detokenizing.byte_level import ByteTokenTable
from decant.router.text.detokenizing.decoders import described, num_stripped
from decant.router.text.detokenizing.pieces import PieceTokenTable
from decant.router.text.detokenizing.token_table import TokenTable, UnsupportedDecoder
from decant.router.text.tokenizer_steps import flat_steps

_ONE_BY_ONE = frozenset({"Replace", "Metaspace", "WordPiece", "Strip", "BPEDecoder"})


def make_token_table(tokenizer: Tokenizer) -> TokenTable:
    steps = list(flat_steps(described(tokenizer.decoder), "decoders"))
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return ByteTokenTable(tokenizer)
    stripped = 0
    if "Fuse" in names:
        fuse = names.index("Fuse")
        stripped = num_stripped(steps[fuse + 1 :])
        steps, names = steps[:fuse], names[:fuse]
    has_bytes = names[-1:] == ["ByteFallback"]
    for name in names[:-1] if has_bytes else names:
        if name not in _ONE_BY_ONE or (has_bytes and name == "BPEDecoder"):
            raise UnsupportedDecoder(f"a decoder with {name} in this place can't be followed token by token")
    return PieceTokenTable(tokenizer, steps[:-1] if has_bytes else steps, has_bytes=has_bytes, stripped=stripped)
