"""Sample answers of tiny-python at temperature 1 for each schema of the JSON Schema Test Suite, and validate them.

    python -m tests.engine.guides.sampled [--answers 5] [--max-tokens 256]

The schemas come with the source distribution of jsonschema, from the package index.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from decant import models
from decant.engine.engine import Engine
from decant.engine.errors import InvalidRequest
from decant.engine.guides.guide import Guide, GuideKind
from decant.engine.loading import load
from decant.engine.model.model import ModelConfig
from decant.engine.request import FinishReason, Request, SamplingParams, StopParams
from decant.engine.scheduler import Limits
from tests.engine.guides import json_suite
from tests.engine.guides.walk import END, compiler, pieces

PROMPT = "import json\n\nanswer = "
ROWS = 64
KV_BYTES = 1 << 28


@dataclass
class Conformance:
    """Answers of the ``accepted`` schemas. ``wrong``: complete ones that do not validate."""

    schemas: int
    accepted: int = 0
    answers: int = 0
    completed: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def conformance(schemas: Mapping[str, Any], *, answers: int, max_tokens: int) -> Conformance:
    config = ModelConfig(model=str(models.path()), dtype="bfloat16", device="cpu", kv_bytes=KV_BYTES)
    engine = Engine(load(replace(config, eos_token_ids=frozenset({END}))), Limits(512, ROWS, 1024))
    prompt = tuple(Tokenizer.from_file(str(models.path() / "tokenizer.json")).encode(PROMPT).ids)
    found, outputs = Conformance(len(schemas)), dict[str, list[int]]()
    for name, schema in schemas.items():
        grammar = compiler().grammar(Guide(GuideKind.JSON_SCHEMA, json.dumps(schema)))
        try:
            grammar.prepare()
        except InvalidRequest:
            continue
        found.accepted += 1
        for seed in range(answers):
            sampling, id = SamplingParams(temperature=1.0, seed=seed), json.dumps([name, seed])
            engine.add(Request(id, prompt, sampling=sampling, stop=StopParams(max_tokens), grammar=grammar))
            outputs[id] = []
        while len(outputs) - found.answers > ROWS:
            _step(engine, schemas, outputs, found)
    while engine.has_work:
        _step(engine, schemas, outputs, found)
    return found


def _step(engine: Engine, schemas: Mapping[str, Any], outputs: dict[str, list[int]], found: Conformance) -> None:
    step = engine.step()
    for token in step.tokens:
        outputs[token.id].append(token.token)
    for end in step.ended:
        found.answers += 1
        name, _ = json.loads(end.id)
        answer = b"".join(pieces()[token] for token in outputs[end.id] if token != END).decode(errors="replace")
        if end.reason is FinishReason.FAILED:
            found.failed.append(f"{name}: {end.fault}")
        elif end.stop_token == END:
            found.completed += 1
            if not json_suite.is_valid(schemas[name], answer):
                found.wrong.append(f"{name}: {answer[:100]}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.engine.guides.sampled", description=__doc__)
    parser.add_argument("--answers", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=256)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = conformance(json_suite.schemas(Path(folder)), answers=options.answers, max_tokens=options.max_tokens)
    print(f"{found.schemas} schemas, {found.accepted} accepted; {found.answers} answers, {found.completed} complete, "
          f"{len(found.wrong)} of them wrong, {len(found.failed)} failed")  # fmt: skip
    sys.exit("\n".join(found.wrong + found.failed))


if __name__ == "__main__":
    main()
