"""Who is measured: the engine, and what users would run instead, in an environment where they can."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from bench import subprocess_runner as child
from bench.baselines import environment
from bench.subprocess_runner import Job, Tell


class Contender(NamedTuple):
    """``module`` measures it, in an environment with what ``requirements`` says; None: in this one."""

    title: str
    module: str
    requirements: Path | None = None


OURS = "decant"
_NEEDS = Path(environment.__file__).parent
CONTENDERS: Mapping[str, Contender] = MappingProxyType(
    {
        OURS: Contender("Decant", "bench.own_engine"),
        "static": Contender("transformers, static batches", "bench.baselines.static"),
        "continuous": Contender("transformers, continuous batching", "bench.baselines.continuous"),
        "vllm": Contender("vLLM", "bench.baselines.vllm", _NEEDS / "vllm.txt"),
        "openvino": Contender("OpenVINO GenAI", "bench.baselines.openvino", _NEEDS / "openvino.txt"),
    }
)
BASELINES = tuple(name for name in CONTENDERS if name != OURS)


def title_of(name: str) -> str:
    """What people call a contender."""
    return CONTENDERS[name].title


class Unavailable(RuntimeError):
    """A baseline that can't be measured here; the message is the reason, in a line."""


def run(contender: Contender, job: Job, tell: Tell, say: Callable[[str], None]) -> dict[str, Any]:
    """One run; ``say`` hears what is being installed. Raises ChildFailed of ours, Unavailable of others."""
    if contender == CONTENDERS[OURS]:
        return child.run(contender.module, job, tell)
    try:
        python = None if contender.requirements is None else environment.python(contender.requirements, say)
        return child.run(contender.module, job, tell, python)
    except environment.NotInstallable as error:
        raise Unavailable(f"it can't be installed: {error}") from error
    except child.ChildFailed as error:
        raise Unavailable(error.reason) from error
