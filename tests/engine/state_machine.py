"""All actions on two engines with too few blocks, checked after each action.

A hypothesis machine and random scripts drive it. An action that does not apply does nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace

from decant.engine.costs import StepCostModel
from decant.engine.engine import Engine
from decant.engine.errors import InvalidRequest, OutOfBlocks, UnknownSequence
from decant.engine.fake import FakeDevice
from decant.engine.kv_layout import FULL, Window, WindowKind
from decant.engine.plan import StepPlan, StepResult
from decant.engine.request import FinishReason, Request, SamplingParams, StopParams
from decant.engine.scheduler import Limits
from decant.engine.transfer import IncomingSequence, KvExport, TransferCommit
from tests.engine import properties
from tests.engine.factories import BLOCK, OutputLog, SequenceOutput, recompute_each_step, ticking

BLOCKS = 8
CONTEXT_LENGTH = BLOCKS * BLOCK
VOCABULARY = 64
EOS = frozenset({3, 5})
COSTS = (StepCostModel(), StepCostModel(token=0.1, pair=0.002))
"""Unknown, so that only the token budget counts; and such that a few tokens fill the time of a step."""
Windows = tuple[Window, ...]
SLIDING, CHUNKED, NARROW = Window(WindowKind.SLIDING, 7), Window(WindowKind.CHUNKED, 6), Window(WindowKind.SLIDING, 3)
GROUPS: tuple[Windows, ...] = (
    (SLIDING,),
    (CHUNKED,),
    (FULL, SLIDING),
    (FULL, CHUNKED),
    (SLIDING, NARROW),
    (FULL, SLIDING, NARROW),
    (FULL, FULL, CHUNKED),
)
MEMORY: dict[str, SequenceOutput] = {}


class Watched(FakeDevice):
    engine: Engine
    ran: frozenset[str] = frozenset()  # before this step
    forked: Set[str] = frozenset()

    def run(self, plan: StepPlan) -> StepResult:
        properties.plan_keeps_the_limits(self.engine, plan)
        properties.plan_is_in_order(self.engine, plan, self.ran, self.forked)
        properties.no_prompt_follows_one_that_was_cut(plan, self.forked)
        return super().run(plan)


def _device(kind: type[FakeDevice], num_blocks: int, windows: Windows = (FULL,)) -> FakeDevice:
    device = kind(
        num_blocks=num_blocks, block_size=BLOCK, vocab_size=VOCABULARY, context_length=CONTEXT_LENGTH, eos_token_ids=EOS
    )
    device.windows = windows
    return device


def expected(request: Request, windows: Windows = (FULL,)) -> SequenceOutput:
    same = replace(request, id="alone", park_after=None, priority=0, salt=b"", use_prefix_cache=True)
    key = f"{windows} {same}"
    if key not in MEMORY:
        MEMORY[key] = recompute_each_step(
            _device(FakeDevice, len(windows) * (BLOCKS + 1), windows), same, CONTEXT_LENGTH
        )
    return MEMORY[key]


@dataclass(slots=True)
class Move:
    sender: int
    export: KvExport
    arrival: IncomingSequence
    sent: int = 0
    commit: TransferCommit | None = None


class World:
    """Two engines and the actions on them; in each action ``n`` picks one of the candidates."""

    def __init__(
        self,
        budget: int = 6,
        max_running: int = 4,
        costs: StepCostModel = COSTS[0],
        windows: Windows = (FULL,),
        kind: type[Watched] = Watched,
    ) -> None:
        limits = Limits(token_budget=max(budget, max_running), max_running=max_running, context_length=CONTEXT_LENGTH)
        self.windows = windows
        self._kind = kind
        self.engines = [self._engine(limits, costs), self._engine(limits, costs)]
        self.log = OutputLog()
        self.contents = [properties.Contents(), properties.Contents()]
        self.requests: dict[str, Request] = {}
        self.engine_of: dict[str, int] = {}
        self.moves: dict[str, Move] = {}
        self.cancelled: set[str] = set()
        self.joined = 0
        self.forked: set[str] = set()  # forks and their roots
        for engine in self.engines:
            assert isinstance(engine.device, Watched)
            engine.device.forked = self.forked

    def _engine(self, limits: Limits, costs: StepCostModel) -> Engine:
        most = sum(window.blocks_at_once(BLOCKS, BLOCK) for window in self.windows)
        device = _device(self._kind, max(BLOCKS, most), self.windows)
        assert isinstance(device, Watched)
        device.costs = costs
        device.engine = Engine(device, limits, clock=ticking())
        return device.engine

    # -- actions ------------------------------------------------------------------------------------------------

    def add(self, where: int, request: Request, outputs: int = 1) -> None:
        """Add a request; further outputs are forks with other draws."""
        requests = []
        for index in range(outputs):
            sampling = replace(request.sampling, output_index=index)
            logprobs = None if index else request.prompt_logprobs
            id = f"s{len(self.requests) + index}"
            requests.append(replace(request, id=id, sampling=sampling, prompt_logprobs=logprobs))
        try:
            self.engines[where].add(requests[0], requests[1:])
        except InvalidRequest as error:
            if error.field != "n":
                raise
            return
        for each in requests:
            self.requests[each.id] = each
            self.engine_of[each.id] = where
        if outputs > 1:
            self.forked |= {each.id for each in requests}

    def step(self, where: int) -> None:
        engine = self.engines[where]
        assert isinstance(engine.device, Watched)
        ran = tuple(engine.scheduler.running)
        forks = frozenset(fork.id for sequence in ran for fork in sequence.forks)
        engine.device.ran = frozenset(sequence.id for sequence in ran) | forks
        output = self.log.record(engine.step())
        alive = {*engine.scheduler.running, *engine.scheduler.waiting}
        ended = {ended.id for ended in output.ended}
        assert not ended & {sequence.id for sequence in alive}, "a sequence that ended is still there"
        properties.changes_are_in_order(ran, engine.scheduler.running, engine.scheduler.waiting, forks)

    def cancel(self, n: int) -> None:
        id = _pick([id for id in self._alive() if id not in self._committed_siblings()], n)
        if id:
            engine = self.engines[self.engine_of[id]]
            self.cancelled |= {id, *(fork.id for fork in engine.sequences[id].forks)}
            assert engine.cancel(id)
            assert not engine.cancel(id), "it was cancelled twice"

    def _committed_siblings(self) -> set[str]:
        """Sequences that move with another one whose commit is made: a receiver may have them already."""
        return {
            each.id
            for id, move in self.moves.items()
            if move.commit and id in self.engines[move.sender].sequences
            for each in self.engines[move.sender].sequences[id].siblings
            if each.id != id
        }

    def park(self, n: int) -> None:
        id = _pick([s.id for engine in self.engines for s in engine.scheduler.running], n)
        if id:
            engine = self.engines[self.engine_of[id]]
            try:
                engine.park(id)
            except UnknownSequence:
                assert engine.committed_output is not None, "it ran, and no step in flight ended it"
            self._publish(engine)

    def resume(self, n: int) -> None:
        for engine in self.engines:
            moving = {each.id for id in self.moves if id in engine.sequences for each in engine.sequences[id].siblings}
            id = _pick([id for id in properties.parked(engine) if id not in moving | self.moves.keys()], n)
            if id:
                engine.resume(id)
                self._publish(engine)

    def _publish(self, engine: Engine) -> None:
        if engine.committed_output is not None:
            self.log.record(engine.step())

    def open(self, n: int) -> None:
        id = _pick([id for id in self._alive() if id not in self.moves], n)
        if not id:
            return
        sender = self.engine_of[id]
        siblings = [each.id for each in self.engines[sender].sequences[id].siblings if each.id != id]
        if any(each in self.moves for each in siblings):
            return
        request, *forks = [replace(self.requests[each], park_after=None) for each in (id, *siblings)]
        try:
            arrival = self.engines[1 - sender].transfers.reserve(request, forks)
        except OutOfBlocks:
            return
        except InvalidRequest as error:
            if error.field not in ("token_ids", "n"):
                raise
            return
        self.moves[id] = Move(sender, self.engines[sender].transfers.export(id, arrival.cached_blocks), arrival)

    def push(self, n: int, most: int = 100) -> None:
        move = self.moves.get(_pick(list(self.moves), n))
        if move and not move.arrival.closed:
            for block in move.export.blocks[move.sent : move.sent + most]:
                try:
                    move.arrival.extend(BLOCK * (block.address.block + 1) - 1)
                except OutOfBlocks:
                    return
                move.arrival.write(block.address, bytes(move.export.read(block.address)), block.checksum)
                move.sent += 1

    def finalize(self, n: int) -> None:
        id = _pick([id for id, move in self.moves.items() if self._parked(id, move) and not move.commit], n)
        if not id:
            return
        sender = self.engines[self.moves[id].sender]
        try:
            self.moves[id].commit = sender.transfers.finalize(id)
        except InvalidRequest as error:
            if error.field != "computed":
                raise
            sender.resume(id)
        except UnknownSequence:
            assert len(sender.sequences[id].siblings) > 1, "only another output can have kept it from being committed"

    def finalize_running(self, n: int) -> None:
        id = _pick([id for id, move in self.moves.items() if not move.arrival.closed and not move.commit], n)
        if not id or self._parked(id, self.moves[id]):
            return
        self.push(list(self.moves).index(id))
        sender = self.engines[self.moves[id].sender]
        try:
            self.moves[id].commit = sender.transfers.finalize_running(id, self.moves[id].sent)
        except UnknownSequence:
            assert id not in sender.sequences
        self._publish(sender)

    def join(self, n: int) -> None:
        id = _pick([id for id, move in self.moves.items() if move.commit and self._parked(id, move)], n)
        if not id:
            return
        move = self.moves[id]
        self.push(list(self.moves).index(id))
        if move.commit is None or move.sent < len(move.export.blocks):
            return  # no room for what it wrote in the meantime
        receiver = self.engines[1 - move.sender]
        receiver.transfers.join(move.arrival, move.commit)
        self._publish(receiver)
        self.engines[move.sender].transfers.release(id)
        for each in receiver.sequences[id].siblings or [receiver.sequences[id]]:
            assert each.id not in self.engines[move.sender].sequences, "it is here and there"
            self.engine_of[each.id] = 1 - move.sender
        self.joined += 1
        del self.moves[id]

    def give_up(self, n: int, *, by_cancel: bool = False) -> None:
        id = _pick(list(self.moves), n)
        if not id:
            return
        move = self.moves.pop(id)
        if by_cancel:
            assert self.engines[1 - move.sender].cancel(id)
        move.arrival.abort()
        self.engines[move.sender].transfers.cancel(id)

    # -- checks -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        for engine, contents in zip(self.engines, self.contents, strict=True):
            engine.check_integrity()
            properties.running_keeps_the_limit(engine)
            properties.shared_blocks_are_published_prefixes(engine, self.forked)
            properties.published_blocks_are_filled(engine)
            properties.leases_keep_their_bytes(engine)
            properties.no_unseen_block_is_held(engine)
            contents.check(engine)

    def finish(self) -> None:
        while self.moves:
            self.give_up(0)
            self.check()
        steps = properties.steps_needed(list(self.requests.values()), CONTEXT_LENGTH)
        while any(engine.has_work or properties.parked(engine) for engine in self.engines):
            assert steps, "a sequence never finishes"
            steps -= 1
            self.resume(0)
            for where in (0, 1):
                self.step(where)
            self.check()
        for engine in self.engines:
            properties.nothing_is_held(engine)
        for id, request in self.requests.items():
            properties.same_output_as_alone(self.log[id], expected(request, self.windows))
            cancelled = self.log[id].reason is FinishReason.CANCELLED
            assert not cancelled or id in self.cancelled, f"{id} ended as cancelled without a cancellation"

    def _alive(self) -> list[str]:
        return [id for engine in self.engines for id in properties.live(engine)]

    def _parked(self, id: str, move: Move) -> bool:
        return id in properties.parked(self.engines[move.sender])


def _pick(ids: Sequence[str], n: int) -> str:
    return ids[n % len(ids)] if ids else ""


# -- scripts ----------------------------------------------------------------------------------------------------


def make_world_request(
    family: int,
    length: int,
    *,
    last: int = 0,
    max_tokens: int | None = 6,
    seed: int | None = None,
    **more: object,
) -> Request:
    """Request whose prompt extends its family's shorter ones but for a ``last`` token; families differ in one block."""
    tokens = [((family * 29 if index < BLOCK else 0) + index * 7) % VOCABULARY for index in range(length)]
    tokens[-1] = (tokens[-1] + last) % VOCABULARY
    sampling = SamplingParams() if seed is None else SamplingParams(temperature=1.0, seed=seed)
    request = Request("unnamed", tuple(tokens), sampling=sampling, stop=StopParams(max_tokens=max_tokens))
    return replace(request, **more)  # type: ignore[arg-type]


def random_request(rng: random.Random, longest: int = CONTEXT_LENGTH - 4) -> Request:
    return make_world_request(
        rng.randrange(2),
        rng.randint(1, longest),
        last=rng.choice([0, 0, 1]),
        max_tokens=rng.choice([1, 4, 8, None]),
        seed=rng.choice([None, 1, 2]),
        priority=rng.choice([-1, 0, 0, 1]),
        salt=rng.choice([b"", b"", b"other"]),
        use_prefix_cache=rng.random() < 0.9,
        park_after=rng.choice([None, None, 1, 2]),
        prompt_logprobs=rng.choice([None, None, None, 2]),
        logprobs=rng.choice([None, 1]),
    )


def play(
    seed: int, actions: int = 80, *, forks: bool = False, windows: Windows = (FULL,), kind: type[Watched] = Watched
) -> World:
    rng = random.Random(seed)
    machine = World(rng.choice([1, 3, 6, 16]), rng.choice([1, 2, 4]), COSTS[seed % 2], windows, kind)
    choices: list[tuple[Callable[[], object], int]] = [
        (lambda: machine.add(rng.randrange(2), random_request(rng), rng.randint(1, 3) if forks else 1), 4),
        (lambda: machine.step(rng.randrange(2)), 10),
        (lambda: machine.cancel(rng.randrange(99)), 1),
        (lambda: machine.park(rng.randrange(99)), 1),
        (lambda: machine.resume(rng.randrange(99)), 1),
        (lambda: machine.open(rng.randrange(99)), 3),
        (lambda: machine.push(rng.randrange(99), rng.randint(1, 3)), 3),
        (lambda: machine.finalize(rng.randrange(99)), 3),
        (lambda: machine.finalize_running(rng.randrange(99)), 1),
        (lambda: machine.join(rng.randrange(99)), 3),
        (lambda: machine.give_up(rng.randrange(99), by_cancel=rng.random() < 0.5), 1),
    ]
    weights = [weight for _, weight in choices]
    for _ in range(actions):
        rng.choices([action for action, _ in choices], weights)[0]()
        machine.check()
    machine.finish()
    return machine
