"""Random histories of one request: owners whose writes arrive twice, late, reordered or never, or that lose the request
to an adopter unnoticed; and an emptied Redis. After every step Redis must equal a simple model, with requested
logprobs as complete as the journal.

Journals only grow. Each owner writes distinct tokens, which identify the writer of each position.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import redis as sync_redis

from decant.protos.inference_pb2 import ResponseOptions
from decant.state.errors import Superseded, UnknownRequest
from decant.state.ids import ENDED, State
from decant.state.owned import OwnedRequest
from decant.state.scripts import Command
from decant.state.store import Store
from tests.state.factories import (
    CANCELLED,
    DECODING,
    FAILED,
    HANDING_OFF,
    KEY,
    NOW,
    PREFILLING,
    QUEUED,
    SUCCEEDED,
    continued,
    logprobs,
    make_request,
    packed,
    router,
)

SHOWN = [
    None,
    ResponseOptions(logprobs=2),
    ResponseOptions(logprobs=0, prompt_logprobs=1),
    ResponseOptions(prompt_logprobs=1),
]
PROMPT = [logprobs(place, 1) for place in range(3)]
STATES = [None, QUEUED, PREFILLING, HANDING_OFF, DECODING, SUCCEEDED, FAILED, CANCELLED]


@dataclass(frozen=True)
class Write:
    command: Command
    owner: OwnedRequest
    attempt: int
    state: State
    base: int
    end: int
    whole: bool
    serial: int  # of the record
    has_prompt_logprobs: bool  # it has the prompt's logprobs
    syncs_prompt_logprobs: bool  # and Redis was not known to have them

    @property
    def progress(self) -> tuple[int, int, int]:
        return self.attempt, 5 if self.state in ENDED else self.state, self.end


@dataclass
class Model:
    owner: OwnedRequest
    attempt: int
    state: State
    length: int
    progress: tuple[int, int, int]
    serial: int
    has_prompt_logprobs: bool = False


class Writers:
    def __init__(self, store: Store, bare: sync_redis.Redis, seed: int) -> None:
        self.random = random.Random(seed)
        self.store = store
        self.bare = bare
        self.shown = SHOWN[seed % len(SHOWN)]
        self.owners = [make_request(owner=router(0), shown=self.shown)]
        self.owners[0].record.prompt_tokens = 1  # counts the changes of the record
        self.writes: list[Write] = []
        self.model: Model | None = None
        self.next_token = 0

    async def play(self, steps: int) -> None:
        self.bare.flushall()
        first = self.owners[0]
        await self.store.requests.accept(first)
        self.model = Model(first, 1, first.state, 0, (1, 1, 0), 1)
        takes = (self.adopt, self.ask_again)
        writing = (self.go_on, self.explain, self.move, self.write, self.arrive_late_or_again)
        actions = [*writing, *takes, self.empty_redis]
        weights: list[float] = self.random.choice(
            [[6, 1, 2, 9, 6, 1, 1, 0.4], [3, 1, 1, 9, 4, 4, 2, 1.5], [1, 1, 2, 9, 6, 1, 4, 1]]
        )
        for action in self.random.choices(actions, weights, k=steps):
            await action()
            await self.redis_holds_the_greatest()

    def pick(self) -> OwnedRequest:
        return self.owners[-min(len(self.owners), self.random.choice([1, 1, 1, 2, 2, 3]))]

    async def go_on(self) -> None:
        owner = self.pick()
        if not owner.ended:
            count = self.random.randint(1, 3)
            self.next_token += count
            continued(owner, *range(self.next_token - count, self.next_token))
            owner.record.prompt_tokens += 1

    async def explain(self) -> None:
        owner = self.pick()
        if not owner.has_prompt_logprobs:
            owner.add_prompt_logprobs(packed(PROMPT, 1))

    async def move(self) -> None:
        owner, state = self.pick(), self.random.choice(STATES)
        if state in ENDED and self.random.random() < 0.7:  # keeps requests open for long
            return
        try:
            if state is None:
                owner.start_attempt(NOW)
            else:
                owner.transition(state, NOW)
        except ValueError:
            return
        owner.record.prompt_tokens += 1

    async def write(self) -> None:
        owner = self.pick()
        whole = owner.synced_state is None
        base = 0 if whole else owner.synced_entries
        logprobs = (bool(owner.packed_prompt_logprobs()), owner.prompt_logprobs_unsynced)
        values = (owner.attempt, owner.state, base, owner.length, whole, owner.record.prompt_tokens, *logprobs)
        self.writes.append(Write(self.store.requests._write_command(owner), owner, *values))
        if self.random.random() < 0.7:
            await self.deliver(self.writes[-1], is_acknowledged=self.random.random() < 0.7)

    async def arrive_late_or_again(self) -> None:
        if self.writes:
            await self.deliver(self.random.choice(self.writes[-12:]), is_acknowledged=False)

    async def deliver(self, write: Write, is_acknowledged: bool) -> None:
        answer, length = self.expect(write)
        reply = await self.store.requests._client.run(write.command)
        assert reply[0] == answer, f"{reply} where {answer!r} is right"
        if answer == b"written":
            assert reply[1] == length
            if is_acknowledged:
                write.owner.synced_entries, write.owner.synced_state = length, (write.attempt, write.state)
                write.owner.prompt_logprobs_unsynced &= not write.syncs_prompt_logprobs
        elif is_acknowledged and answer != b"superseded":
            write.owner.synced_entries, write.owner.synced_state = 0, None

    def expect(self, write: Write) -> tuple[bytes, int]:
        now, owner = self.model, write.owner
        if now is None or owner.epoch > now.owner.epoch:
            if not write.whole:
                return b"incomplete", 0
            values = (write.attempt, write.state, write.end, write.progress, write.serial, write.has_prompt_logprobs)
            self.model = Model(owner, *values)
            return b"written", write.end
        if owner is not now.owner or write.attempt < now.attempt:
            return b"superseded", 0
        if now.length < write.base:
            return b"behind", now.length
        now.length = max(now.length, write.end)
        now.has_prompt_logprobs |= write.has_prompt_logprobs
        if write.progress > now.progress:
            now.attempt, now.state, now.serial = write.attempt, write.state, write.serial
            now.progress = write.progress
        return b"written", now.length

    async def adopt(self) -> None:
        incarnation, now = router(self.random.randrange(4)), self.model
        if now and any((old.owner, old.epoch) == (incarnation, now.owner.epoch + 1) for old in self.owners):
            return  # a router does not run one request twice
        behind = self.random.choice([None, 0, 1])  # adopt from any epoch, this one, an earlier one
        epoch = None if behind is None or now is None else now.owner.epoch - behind
        try:
            found = await self.store.requests.adopt(KEY, incarnation, epoch)
        except UnknownRequest:
            assert now is None
            return
        except Superseded:
            assert behind == 1
            return
        assert now
        if incarnation == now.owner.owner or now.state in ENDED:
            assert found.epoch == now.owner.epoch
        else:
            assert behind != 1, "an epoch that is over was taken over"
            new = OwnedRequest.from_stored(found)
            assert new.epoch == now.owner.epoch + 1
            self.owners.append(new)
            now.owner = new

    async def ask_again(self) -> None:
        """Send an equal request: it starts anew if Redis has none, or one that failed without output."""
        incarnation, now = router(self.random.randrange(4)), self.model
        begins = now is None or (now.state == FAILED and not now.length)
        epoch = now.owner.epoch + 1 if now else 1
        if begins and any((old.owner, old.epoch) == (incarnation, epoch) for old in self.owners):
            return  # a router does not run one request twice
        new = make_request(owner=incarnation, shown=self.shown)
        new.record.prompt_tokens = 1
        found = await self.store.requests.accept(new)
        assert (found is None) is begins
        if begins:
            assert new.epoch == epoch
            self.owners.append(new)
            self.model = Model(new, 1, new.state, 0, (1, 1, 0), 1)

    async def empty_redis(self) -> None:
        self.bare.flushall()
        self.model = None

    async def redis_holds_the_greatest(self) -> None:
        now = self.model
        try:
            found = await self.store.requests.read(KEY)
        except UnknownRequest:
            assert now is None, "the request is lost"
            return
        assert now
        assert (found.owner, found.epoch) == (now.owner.owner, now.owner.epoch), "another owner"
        assert (found.attempt, found.state) == (now.attempt, now.state), "another state"
        assert found.length == now.length, "another length"
        assert found.entries == now.owner.entries()[: now.length], "the journal isn't its owner's"
        assert found.record.prompt_tokens == now.serial, "an older record"
        asked = now.owner.logprobs_options
        if asked.output is not None:
            assert found.logprobs.entries() == [logprobs(entry.token, asked.output) for entry in found.entries]
        assert found.prompt_logprobs.entries() == (PROMPT if now.has_prompt_logprobs else []), "the prompt's logprobs"
