from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from bench.baselines import environment
from bench.comparison import subprocess_runner as child
from bench.comparison.subprocess_runner import Job, OnProgress


class Contender(NamedTuple):
    title: str
    module: str
    requirements: Path | None = None


DECANT = "decant"
_NEEDS = Path(environment.__file__).parent
CONTENDERS: Mapping[str, Contender] = MappingProxyType(
    {
        DECANT: Contender("Decant", "bench.comparison.own_engine"),
        "static": Contender("transformers, static batches", "bench.baselines.static"),
        "continuous": Contender("transformers, continuous batching", "bench.baselines.continuous"),
        "vllm": Contender("vLLM", "bench.baselines.vllm", _NEEDS / "vllm.txt"),
        "openvino": Contender("OpenVINO GenAI", "bench.baselines.openvino", _NEEDS / "openvino.txt"),
    }
)
BASELINES = tuple(name for name in CONTENDERS if name != DECANT)


def title_of(name: str) -> str:
    return CONTENDERS[name].title


class Unavailable(RuntimeError):
    pass


def run(contender: Contender, job: Job, on_progress: OnProgress, say: Callable[[str], None]) -> dict[str, Any]:
    """Run a contender. Raises ChildFailed for the engine, Unavailable for a baseline."""
    if contender == CONTENDERS[DECANT]:
        return child.run(contender.module, job, on_progress)
    try:
        python = None if contender.requirements is None else environment.python(contender.requirements, say)
        return child.run(contender.module, job, on_progress, python)
    except environment.NotInstallable as error:
        raise Unavailable(f"it can't be installed: {error}") from error
    except child.ChildFailed as error:
        raise Unavailable(error.reason) from error
