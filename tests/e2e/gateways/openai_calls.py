"""Calls of OpenAI's client to a gateway of the deployment in conftest.py."""

from __future__ import annotations

from typing import Any

from openai import OpenAI

from tests.e2e.deployment import PATIENCE_S

MODEL, ADAPTER = "chat", "tuned"
KEY, LIMITED = "the-key-of-acme", "the-key-of-umbrella"
PROMPT = "def total(values):\n    result = 0\n"
MESSAGES: Any = [{"role": "user", "content": "sum of a list"}]
LONG = 600
"""Tokens of an answer during which a process is killed."""
SCHEMA: Any = {
    "type": "object",
    "properties": {"size": {"type": "integer", "maximum": 99}, "kind": {"enum": ["list", "dict"]}},
    "required": ["size", "kind"],
    "additionalProperties": False,
}


def client_of(url: str, key: str = KEY) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)


def chat(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, "temperature": 0, **fields})


def complete(client: OpenAI, **fields: Any) -> Any:
    return client.completions.create(**{"model": MODEL, "prompt": PROMPT, "temperature": 0, **fields})


def text_of(chunks: Any) -> str:
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


def drawn_greedily(client: OpenAI) -> str:
    text: str = complete(client, max_tokens=24).choices[0].text
    return text
