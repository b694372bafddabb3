from __future__ import annotations

import os
import signal

from decant.client import Client
from decant.client.results import Receipt
from decant.command import audit, generate, status
from decant.command.deployment.deployments import Deployment
from decant.command.deployment.temporary_deployment import temporary_deployment
from decant.command.errors import CommandFailed
from decant.models import PROMPT, SEED, TEMPERATURE

LONG_PROMPT = 'class Queue:\n    """A first-in, first-out queue."""\n\n    def __init__(self):\n'
LONG_TOKENS, KILLED_AFTER = 160, 20
KILLED = "decode-1"
KILLED_MARK = f"<<< {KILLED} killed >>>"
EQUAL = "the text equals that of the undisturbed request"
_END_SECONDS = 120.0


def run() -> None:
    print("decant up --port 0      (a private Redis, a prefill worker, a decode worker, a router)", flush=True)
    with temporary_deployment() as running:
        options = f"--temperature {TEMPERATURE} --seed {SEED} --max-tokens 60"
        print(f"ready on {running.addresses[0]}\n\ndecant generate {options}\n")
        print(PROMPT, end="", flush=True)
        args = generate.GenerateArgs(running.addresses[0], timeout=_END_SECONDS)
        line = generate.run(args, PROMPT, {"temperature": TEMPERATURE, "seed": SEED, "max_tokens": 60})
        print(f"\n{line}")
        print("\ndecant status", flush=True)
        status.run(running.redis_url, as_json=False)
        print("\ndecant audit", flush=True)
        adds_up = audit.run(running.redis_url, running.peer_tls, as_json=False)
        survive_a_kill(running)
    if not adds_up:
        raise CommandFailed("the audit found blocks without an owner")
    print("\nended, nothing left behind")


def survive_a_kill(running: Deployment) -> None:
    """Kill the decode worker while it answers, and compare the text with that of the same request undisturbed.

    Raises CommandFailed if they differ.
    """
    print(f"\nkill -9 {KILLED}      (while it streams an answer of {LONG_TOKENS} tokens)\n")
    with Client(running.addresses[0]) as client:
        undisturbed = client.generate(
            LONG_PROMPT, max_tokens=LONG_TOKENS, temperature=0.6, seed=1, ignore_eos=True, timeout=_END_SECONDS
        )
        text, receipt = _killed_in_mid_answer(client, running.processes[KILLED].pid)
    if text != undisturbed.text:
        raise CommandFailed(f"the answer after the kill differs: {text!r} for {undisturbed.text!r}")
    attempts = 0 if receipt is None else receipt.attempts
    moment = f"{attempts} attempts" if attempts > 1 else f"the answer had left {KILLED} before it was killed"
    print(f"\n\n{moment} | {EQUAL}", flush=True)


def _killed_in_mid_answer(client: Client, pid: int) -> tuple[str, Receipt | None]:
    print(LONG_PROMPT, end="")
    is_killed, tokens, parts = False, 0, list[str]()
    with client.stream(
        LONG_PROMPT, max_tokens=LONG_TOKENS, temperature=0.6, seed=1, ignore_eos=True, timeout=_END_SECONDS
    ) as stream:
        for delta in stream:
            tokens += delta.num_tokens
            parts.append(delta.text)
            print(delta.text, end="", flush=True)
            if tokens >= KILLED_AFTER and not is_killed:
                is_killed = True
                os.kill(pid, signal.SIGKILL)
                print(KILLED_MARK, end="", flush=True)
    return "".join(parts), stream.receipt
