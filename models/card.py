from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaForCausalLM

from decant.engine.checkpoint.quantize import QUANTIZATIONS, quantize
from decant.models import baselines, bpe, evaluate
from decant.models.corpus import Source
from decant.models.loop import Run
from decant.models.recipe import Recipe

# At least five remain after dropping those whose margins another machine's rounding could overturn.
GREEDY_PROMPTS = (
    "def __eq__(self, other):\n",
    "    if not isinstance(",
    "@property\ndef name(self):\n",
    "class TestCase(",
    "def get(self, key, default=None):\n",
    "def __repr__(self):\n",
    'def is_valid(name):\n    """Return True if ',
    "class Queue:\n    def __init__(self, maxsize=0):\n",
    "def read_file(path):\n    with open(path",
    "import os\nimport sys\n\ndef main():\n",
)
GREEDY_KEPT = 5
GREEDY_LENGTH = 32
GREEDY_MARGIN = 1e-3

SAMPLE_PROMPTS = (
    'def read_lines(path):\n    """Return the lines of a file as a list of strings."""\n',
    'def close(self):\n    """Close the connection."""\n',
    'def parse_header(line):\n    """Split a header line into its name and value."""\n',
    'def add_option(self, name, default=None):\n    """Add an option to the parser."""\n',
    'def find_module(name, path=None):\n    """Search for a module and return its spec."""\n',
)
SAMPLES_ON_CARD = 3
TEMPERATURE = 0.7
EXCERPT_TOKENS = 1500


def finish(run: Run, recipe: Recipe, tokenizer: Tokenizer, sources: list[Source], out: Path) -> None:
    """Save the model, its figures and its card.

    Figures are of the files as read back, in float32 on the CPU, so a test can repeat them.
    """
    out.mkdir(parents=True, exist_ok=True)
    save_model(run.model, tokenizer, recipe, out)
    model = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    held_out = [source for source in sources if source.held_out]
    training = [source for source in sources if not source.held_out]
    excerpt = choose_excerpt(held_out, tokenizer)
    (out / "excerpt.txt").write_text(excerpt.text, encoding="utf-8")
    figures = {
        "loss": losses(model, tokenizer, training, held_out),
        "quantized": quantized_losses(out, bpe.encode(tokenizer, [source.text for source in held_out])),
        "excerpt": {
            "source": excerpt.name,
            "nats_per_token": evaluate.mean_nats(model, bpe.encode(tokenizer, [excerpt.text])),
        },
        "greedy": greedy_records(model, tokenizer),
        "samples": samples(model, tokenizer),
        "training": training_facts(run, recipe, training, held_out),
        "machine": machine_facts(run),
        "sha256": {file.name: _sha256(file) for file in sorted(out.iterdir()) if _is_hashed(file)},
    }
    (out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    (out / "README.md").write_text(render(figures, out), encoding="utf-8")


def save_model(model: LlamaForCausalLM, tokenizer: Tokenizer, recipe: Recipe, out: Path) -> None:
    saved = LlamaForCausalLM(model.config).to(torch.bfloat16)  # type: ignore[arg-type]
    saved.load_state_dict(model.state_dict())
    saved.config.dtype = torch.bfloat16
    saved.generation_config = GenerationConfig(
        bos_token_id=bpe.BEGIN_ID, eos_token_id=bpe.END_ID, pad_token_id=bpe.END_ID
    )
    saved.save_pretrained(out)
    bpe.save(tokenizer, out, recipe.long_context)


def choose_excerpt(held_out: list[Source], tokenizer: Tokenizer) -> Source:
    fitting = [source for source in held_out if len(tokenizer.encode(source.text).ids) <= EXCERPT_TOKENS]
    return max(fitting, key=lambda source: (len(source.text), source.name))


def losses(
    model: LlamaForCausalLM, tokenizer: Tokenizer, training: list[Source], held_out: list[Source]
) -> dict[str, Any]:
    held = bpe.encode(tokenizer, [source.text for source in held_out])
    train_stream = np.concatenate(bpe.encode(tokenizer, [source.text for source in training]))
    held_stream = np.concatenate(held)
    scored = held_stream != bpe.BEGIN_ID
    size = tokenizer.get_vocab_size()
    nats = {
        "model": evaluate.mean_nats(model, held),
        "unigram": baselines.unigram_loss(train_stream, held_stream, scored, size),
        "5-gram": baselines.ngram_loss(train_stream, held_stream, scored, size),
    }
    tokens, text_bytes = int(scored.sum()), sum(source.size for source in held_out)
    per_byte = tokens / text_bytes / math.log(2)
    return {
        "tokens": tokens,
        "bytes": text_bytes,
        "nats_per_token": nats,
        "bits_per_byte": {name: value * per_byte for name, value in nats.items()},
    }


def quantized_losses(folder: Path, documents: list[np.ndarray]) -> dict[str, float]:
    """Nats per token of the saved model with its weights quantized."""
    found: dict[str, float] = {}
    for to in QUANTIZATIONS:
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        quantize(model, to)
        found[to] = evaluate.mean_nats(model, documents)
    return found


def greedy_records(model: LlamaForCausalLM, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for prompt in GREEDY_PROMPTS:
        continuation = evaluate.greedy(model, tokenizer.encode(prompt).ids, GREEDY_LENGTH)
        if continuation.margin > GREEDY_MARGIN and len(records) < GREEDY_KEPT:
            text = tokenizer.decode(continuation.tokens, skip_special_tokens=False)
            records.append({"text": prompt, **dataclasses.asdict(continuation), "continuation": text})
    return records


def samples(model: LlamaForCausalLM, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    drawn = []
    for seed, prompt in enumerate(SAMPLE_PROMPTS[:SAMPLES_ON_CARD]):
        tokens = evaluate.sample(model, tokenizer.encode(prompt).ids, seed, TEMPERATURE)
        drawn.append({"seed": seed, "prompt": prompt, "text": tokenizer.decode(tokens)})
    return drawn


def training_facts(run: Run, recipe: Recipe, training: list[Source], held_out: list[Source]) -> dict[str, Any]:
    return {
        "parameters": run.model.num_parameters(),
        "recipe": dataclasses.asdict(recipe),
        "tokens": recipe.steps * recipe.tokens_per_step,
        "seconds": round(run.seconds, 1),
        "files": len(training),
        "bytes": sum(source.size for source in training),
        "held_out_files": [source.name for source in held_out],
    }


def machine_facts(run: Run) -> dict[str, Any]:
    device = run.model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {
        "device": f"{device.type}: {name}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }


def render(figures: dict[str, Any], out: Path) -> str:
    training, loss = figures["training"], figures["loss"]
    rows = [
        f"| {name} | {loss['nats_per_token'][name]:.4f} | {loss['bits_per_byte'][name]:.4f} |"
        for name in ("model", "5-gram", "unigram")
    ]
    rows += [
        f"| model, `--quantize {to}` | {nats:.4f} | {nats * loss['tokens'] / loss['bytes'] / math.log(2):.4f} |"
        for to, nats in figures["quantized"].items()
    ]
    rendered = [
        f"Seed {sample['seed']}:\n\n```python\n{sample['prompt']}{sample['text'].rstrip()}\n```"
        for sample in figures["samples"]
    ]
    hashes = [f"| `{name}` | `{digest}` |" for name, digest in figures["sha256"].items()]
    template = Path(__file__).with_name("card_template.md").read_text(encoding="utf-8")
    return template.format(
        name=out.name,
        losses="\n".join(rows),
        samples="\n\n".join(rendered),
        hashes="\n".join(hashes),
        minutes=training["seconds"] / 60,
        rate=training["tokens"] / max(training["seconds"], 1e-9),
        **training,
        **training["recipe"],
        **figures["machine"],
        **{f"excerpt_{key}": value for key, value in figures["excerpt"].items()},
        held_tokens=loss["tokens"],
        held_bytes=loss["bytes"],
        held_files=len(training["held_out_files"]),
        megabytes=training["bytes"] / 1e6,
        temperature=TEMPERATURE,
    )


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _is_hashed(file: Path) -> bool:
    return file.is_file() and file.name not in {"README.md", "figures.json"}


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
