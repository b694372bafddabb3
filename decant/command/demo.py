from __future__ import annotations

from decant.command import audit, generate, status
from decant.command.deployment.temporary_deployment import temporary_deployment
from decant.command.errors import CommandFailed

PROMPT = 'def is_empty(self):\n    """Return True if the queue is empty."""\n'
SEED = 2
"""Gives a complete function with each build of the kernels."""
_END_SECONDS = 120.0


def run() -> None:
    print("decant up --port 0      (a private Redis, a prefill worker, a decode worker, a router)", flush=True)
    with temporary_deployment() as running:
        print(f"ready on {running.addresses[0]}\n\ndecant generate --temperature 0.7 --seed {SEED} --max-tokens 60\n")
        print(PROMPT, end="", flush=True)
        args = generate.GenerateArgs(running.addresses[0], timeout=_END_SECONDS)
        line = generate.run(args, PROMPT, {"temperature": 0.7, "seed": SEED, "max_tokens": 60})
        print(f"\n{line}")
        print("\ndecant status", flush=True)
        status.run(running.redis_url, as_json=False)
        print("\ndecant audit", flush=True)
        adds_up = audit.run(running.redis_url, running.peer_tls, as_json=False)
    if not adds_up:
        raise CommandFailed("the audit found blocks without an owner")
    print("\nended, nothing left behind")
