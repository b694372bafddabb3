"""Limits of compiling and following a grammar, the same in the router's check and in workers."""

from __future__ import annotations

PARSER_LIMITS: dict[str, int | bool] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 20_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}
"""Arguments of ``LLParserLimits``. Beyond one of them a matcher fails: a mask takes milliseconds at most."""
