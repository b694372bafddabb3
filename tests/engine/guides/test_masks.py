"""Sets of tokens that a mask takes as a whole make it faster, and change nothing."""

from __future__ import annotations

import json
import random
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from decant import models
from decant.engine.guides.guide import Guide, GuideKind
from decant.engine.guides.limits import PARSER_LIMITS
from tests.engine.guides.walk import END, VOCABULARY, allowed, compiler


def test_a_mask_is_the_same_without_sets_of_tokens() -> None:
    text: dict[str, Any] = {"type": "string", "minLength": 3, "maxLength": 40}
    guide = Guide(GuideKind.JSON_SCHEMA, json.dumps({"type": "array", "items": text, "minItems": 99}))
    tokenizer = LLTokenizer(str(models.path() / "tokenizer.json"), n_vocab=VOCABULARY, eos_token=[END], slices=[])
    limits: Any = PARSER_LIMITS
    plain = LLMatcher(tokenizer, guide.matcher_grammar(), log_level=0, limits=LLParserLimits(**limits))
    matcher, mask = compiler().compile(guide)
    draw = random.Random(1)
    for _ in range(200):
        assert mask == plain.compute_bitmask()
        token = int(draw.choice(allowed(mask)))
        assert matcher.consume_token(token)
        assert plain.consume_token(token)
        mask = matcher.compute_bitmask()
