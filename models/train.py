"""Train the model of the quick start: from the interpreter's own standard library to the finished files.

    python -m decant.models.train                      the committed model (two cores: about an hour)
    python -m decant.models.train --size large --device cuda --work work-large --out my-model

The same command resumes an interrupted run from its last checkpoint. The options, the interpreter's version, the
machine's type and its number of threads determine the result.

For a larger model use ``--size large``, or change single sizes with ``--set``, for example
``--set layers=8 --set hidden_size=384 --set steps=3000``. ``--set`` accepts every value of ``models/recipe.py``.
A pass over the library and its definitions is about 6 million tokens, so a larger model sees the same text many
times; the card's held-out loss shows when more steps or layers stop helping.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from decant import models
from decant.models import bpe, card, corpus, loop
from decant.models.progress import Bar
from decant.models.recipe import PRESETS, Recipe


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m decant.models.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=models.path(), help="folder of the finished model")
    parser.add_argument("--work", type=Path, default=Path("train-work"), help="folder of the checkpoint")
    parser.add_argument("--size", choices=sorted(PRESETS), default="tiny", help="preset to start from")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="change one value")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", type=torch.device, default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads; part of what fixes the result")
    parser.add_argument("--corpus", type=Path, default=corpus.standard_library(), help="root of the sources")
    options = parser.parse_args(arguments)
    try:
        options.recipe = changed(dataclasses.replace(PRESETS[options.size], seed=options.seed), options.set)
    except ValueError as error:
        parser.error(str(error))
    return options


def changed(recipe: Recipe, changes: list[str]) -> Recipe:
    types = {field.name: type(getattr(recipe, field.name)) for field in dataclasses.fields(recipe)}
    values = {}
    for change in changes:
        name, _, value = change.partition("=")
        if name not in types:
            raise ValueError(f"--set {name}: no such value; there are {', '.join(types)}")
        values[name] = types[name](value)
    return dataclasses.replace(recipe, **values)


def prepare(device: torch.device, threads: int) -> None:
    """Make training repeatable; call it before the first use of cuBLAS."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory costs a pass over it and only guards against bugs elsewhere.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    if device.type == "cuda":
        torch.backends.cuda.enable_mem_efficient_sdp(False)  # its backward pass is not repeatable


def fit_tokenizer(work: Path, texts: list[str], vocab_size: int) -> Tokenizer:
    file = work / f"tokenizer-{vocab_size}.json"
    if not file.exists():
        partial = file.with_suffix(".partial")
        bpe.fit(texts, vocab_size).save(str(partial))
        os.replace(partial, file)
    return Tokenizer.from_file(str(file))


def documents(tokenizer: Tokenizer, sources: list[corpus.Source]) -> list[np.ndarray]:
    texts = [source.text for source in sources]
    texts += [segment for source in sources for segment in corpus.definitions(source.text)]
    return bpe.encode(tokenizer, texts)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    recipe: Recipe = options.recipe
    prepare(options.device, options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    (options.work / ".gitignore").write_text("*\n")
    sources = corpus.read_sources(options.corpus)
    training = [source for source in sources if not source.held_out]
    held_out = [source for source in sources if source.held_out]
    tokenizer = fit_tokenizer(options.work, [source.text for source in training], recipe.vocab_size)
    stream = documents(tokenizer, training)
    tokens = sum(len(document) for document in stream)
    print(f"{len(training)} training files, {len(held_out)} held out, {tokens:,} tokens in a pass")
    with Bar(recipe) as bar:
        run = loop.train(recipe, stream, options.work / "checkpoint.pt", options.device, bar.report)
    run.model.to("cpu")  # type: ignore[arg-type]
    card.finish(run, recipe, tokenizer, sources, options.out)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on from the last checkpoint")
    except loop.CheckpointMismatch as error:
        sys.exit(f"{error}; give another --work, or remove that file to start anew")
