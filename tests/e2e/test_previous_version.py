"""An upgrade, process by process, from the version before the last change of the processes' messages.

The other side is a wheel of that commit in an environment of its own.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import grpc
import pytest

from decant import AsyncClient, models
from decant.protos import inference_pb2 as pb
from decant.protos.inference_pb2_grpc import InferenceServiceStub
from decant.state.private_redis import PrivateRedis
from tests.build.environments import ROOT, borrow_packages, build_wheel, make_environment, succeed
from tests.e2e.client_checks import Answer, generate_request, join_messages
from tests.e2e.deployment import ON_A_BUSY_MACHINE, PATIENCE_S, SMALL_KV, Process

pytestmark = pytest.mark.slow

MESSAGES = ("protos/worker.proto", "protos/state.proto")
TOKENS = 400
AFTER_A_CHANGE = 100
"""Tokens of an answer during which nothing is replaced."""
BEFORE_THE_END = 20
"""Tokens of an answer when the old process gets SIGTERM."""
STREAMS = 3
"""Answers at once while a process is replaced."""
LOAD_TOKENS = 64
LOAD_PAUSE_S = 1.0
"""Between two answers of a client that asks from the first process to the last."""
KINDS = ("decode_worker", "prefill_worker", "router")


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the previous version."""
    folder = tmp_path_factory.mktemp("previous")
    try:
        changed = git("rev-list", "-1", "HEAD", "--", *MESSAGES)
        commit = git("rev-parse", "--verify", f"{changed}^")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"the history has no commit before the last change of the messages: {error.stderr.strip()}")
    tree = folder / "tree"
    tree.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "x", "-C", tree], input=archive, check=True)
    wheel = build_wheel(tree, folder / "wheel")
    python = make_environment(folder / "venv")
    borrow_packages(folder / "venv")
    succeed(python.parent / "python", "-m", "uv", "pip", "install", "--python", python, "--no-deps", "--offline", wheel,
            cwd=folder)  # fmt: skip
    return python


def prompt_of(number: int) -> str:
    return f"def total_{number}(values):\n    result = {number}\n" * 12


class Upgrade:
    """A deployment whose processes are replaced one by one; a process is old with the interpreter of ``previous``."""

    def __init__(self, redis: PrivateRedis, previous: Path) -> None:
        self._redis = redis
        self._previous = previous
        self._ids = count()
        self.router = ""
        """Address of the newest router."""
        self.routers: tuple[str, ...] = ()
        """Addresses for clients: of the newest router, and of the one that it replaces."""
        self.running: dict[str, Process] = {}

    def start(self, kind: str, version: str) -> Process:
        common = ["--port", "0", "--redis-url", self._redis.url, "--drain-seconds", f"{PATIENCE_S:g}"]
        if kind == "router":
            arguments = [*common, "--models", str(models.path()), "--handoff-min-tokens", "0"]
        else:
            arguments = [*common, "--model", str(models.path()), "--kernels", "none", "--dtype", "float32"]
            arguments += [*ON_A_BUSY_MACHINE, *SMALL_KV, "--id", f"{version}-{kind}-{len(self.running)}"]
        return Process(kind, *arguments, python=self._previous if version == "old" else None)

    def wait_ready(self, kind: str, process: Process) -> None:
        address = process.until("serving")["address"]
        process.until("readiness", state="ready")
        if kind == "router":
            self.routers = (address, *([self.router] if self.router else []))
            self.router = address

    def add(self, kind: str, version: str) -> Process:
        """Start a new process beside the old one, which is returned."""
        process = self.start(kind, version)
        self.wait_ready(kind, process)
        before, self.running[kind] = self.running[kind], process
        return before

    async def stored(self, id: str) -> pb.Generation:
        async with grpc.aio.insecure_channel(self.router) as channel:
            request = pb.GetGenerationRequest(request_id=id)
            found: pb.Generation = await InferenceServiceStub(channel).GetGeneration(request, timeout=PATIENCE_S)
            return found

    async def answers(self, router: str = "", ended: Process | None = None) -> list[Answer]:
        """Stream ``STREAMS`` answers at once; send SIGTERM to ``ended`` in the middle of the first."""
        others = [self.answer(TOKENS, number, router=router) for number in range(1, STREAMS)]
        return await asyncio.gather(self.answer(TOKENS, router=router, ended=ended), *others)

    async def ask_on(self, expected: str, ends: asyncio.Event) -> int:
        """Stream one answer after another from any router, each compared to an earlier one, and count them."""
        for asked in count():
            if ends.is_set():
                return asked
            async with AsyncClient(",".join(self.routers)) as client:
                stream = client.stream(prompt_of(0), max_tokens=LOAD_TOKENS, ignore_eos=True, temperature=0)
                text = "".join([delta.text async for delta in stream])
                assert stream.usage is not None
                assert stream.usage.completion_tokens == LOAD_TOKENS
                assert expected.startswith(text)
            await asyncio.sleep(LOAD_PAUSE_S)
        raise AssertionError

    async def answer(self, tokens: int, number: int = 0, *, router: str = "", ended: Process | None = None) -> Answer:
        """Ask a router, or the newest one; send SIGTERM to ``ended`` when the answer has ``BEFORE_THE_END`` tokens."""
        request = generate_request(prompt_of(number), max_tokens=tokens)
        request.request_id = str(next(self._ids))
        request.stopping.ignore_eos = True
        messages: list[pb.GenerateStreamResponse] = []
        is_asked = False
        # Without a deadline: on a busy machine a router may forecast that the answer misses it, and refuse.
        async with grpc.aio.insecure_channel(router or self.router) as channel, asyncio.timeout(PATIENCE_S):
            async for message in InferenceServiceStub(channel).GenerateStream(request):
                messages.append(message)
                if ended is not None and not is_asked and message.seq > BEFORE_THE_END:
                    ended.ask_to_end()
                    is_asked = True
        if ended is not None:
            assert is_asked
            assert await asyncio.to_thread(ended.end) == 0
        answer = join_messages(messages)
        assert answer.receipt.attempts == 1, "nothing was computed again"
        return answer


@pytest.fixture
def upgrade(previous: Path) -> Iterator[Upgrade]:
    with PrivateRedis() as redis:
        made = Upgrade(redis, previous)
        made.running = {kind: made.start(kind, "old") for kind in KINDS}
        try:
            for kind, process in made.running.items():
                made.wait_ready(kind, process)
            yield made
        finally:
            for process in made.running.values():
                process.ask_to_end(excused=True)
            statuses = [process.end() for process in made.running.values()]
        assert statuses == [0] * len(KINDS)


async def test_versions_that_differ_by_one_serve_together_and_replacing_each_process_drops_nothing(
    upgrade: Upgrade,
) -> None:
    expected = await upgrade.answers()
    assert [len(each.ids) for each in expected] == [TOKENS] * STREAMS
    ends = asyncio.Event()
    asking = asyncio.create_task(upgrade.ask_on(expected[0].text, ends))
    for kind, version in (  # in an order in which an old and a new process of each two kinds meet
        ("prefill_worker", "new"),
        ("router", "new"),
        ("decode_worker", "new"),
        ("prefill_worker", "old"),
        ("router", "old"),
    ):
        router = upgrade.router
        before = await asyncio.to_thread(upgrade.add, kind, version)
        during = await upgrade.answers(router, before)
        assert texts(during) == texts(expected), f"while the {kind} becomes {version}"
        after = await upgrade.answer(AFTER_A_CHANGE)
        assert after.ids == expected[0].ids[:AFTER_A_CHANGE], f"with a {version} {kind}"
        assert expected[0].text.startswith(after.text)
        assert (await upgrade.stored("0")).result.outputs[0].text == expected[0].text, "of the first router"
    ends.set()
    assert await asking > len(KINDS), "a client asked all the time"


def texts(answers: Sequence[Answer]) -> list[tuple[list[int], str]]:
    return [(each.ids, each.text) for each in answers]
