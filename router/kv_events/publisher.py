"""Which blocks are published: those whose tokens are known here, that a worker has, and whose parent is published."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

from decant.router.kv_events.feed import EventFeed, History, Subscription
from decant.router.kv_events.known_blocks import TOKEN_BYTES, KnownBlock, KnownBlocks, Namespace
from decant.router.placement.prefix_index import PrefixIndex, PromptBlocks
from decant.router.request.token_stream import TokenStream
from decant.runtime.errors import Unimplemented
from decant.runtime.packed import pack

HISTORY_SHARE = 0.25
"""Part of the memory for batches that subscribers have not read; the rest is for tokens of known blocks."""

MAX_SALT = 256
"""Characters of a ``cache_salt`` whose blocks are published: the memory for a block counts no more."""

OFF = "not implemented without --kv-event-memory (docs/guides/gateways.md)"


class KvEvents(Protocol):
    """What a router does with the blocks of its requests."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def num_subscribers(self) -> int: ...

    def record_prompt(self, stream: TokenStream, prefix: PromptBlocks, block_sizes: Iterable[int]) -> None:
        """Record the tokens of a prompt that goes to workers with these sizes of blocks."""

    def record_answer(self, stream: TokenStream, prefix: PromptBlocks) -> None:
        """Record the tokens of the outputs so far, each after its prompt."""

    def subscribe(self, model: str, tenant: str, after: int) -> Subscription:
        """See ``EventFeed.subscribe``. Raises Unimplemented where events are off."""

    def close(self) -> None:
        """End all subscriptions with Unavailable, for a drain."""


class NoKvEvents:
    num_bytes = num_subscribers = 0

    def record_prompt(self, stream: TokenStream, prefix: PromptBlocks, block_sizes: Iterable[int]) -> None:
        pass

    def record_answer(self, stream: TokenStream, prefix: PromptBlocks) -> None:
        pass

    def subscribe(self, model: str, tenant: str, after: int) -> Subscription:
        raise Unimplemented("SubscribeKvEvents", "a call", limit=OFF)

    def close(self) -> None:
        pass


class KvEventPublisher:
    """Owner of the known blocks and of the feeds. ``follow`` binds it to the workers' reports.

    Its memory is at most ``limit_bytes``, and the hashes of all reported blocks, as the prefix indexes have them.
    """

    def __init__(self, limit_bytes: int) -> None:
        history_bytes = int(limit_bytes * HISTORY_SHARE)
        self.known = KnownBlocks(limit_bytes - history_bytes)
        self.history = History(history_bytes)
        self._holders: dict[str, dict[int, int]] = {}
        """By model and hash; bit n: worker n has reported the block."""
        self._feeds: dict[tuple[str, str], EventFeed] = {}
        self._changed: set[EventFeed] = set()
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        return self.known.num_bytes + self.history.num_bytes

    @property
    def num_subscribers(self) -> int:
        return sum(len(feed.subscriptions) for feed in self._feeds.values())

    def follow(self, indexes: Mapping[str, PrefixIndex]) -> None:
        """Publish the blocks that the workers of these models report from now on."""
        for model, index in indexes.items():
            index.on_reported = partial(self.on_reported, model)

    def on_reported(self, model: str, worker: int, published: Iterable[int], dropped: Iterable[int]) -> None:
        """A worker has these blocks now, and has these no longer; numbers of workers as the prefix index has them."""
        holders, bit, known = self._holders.setdefault(model, {}), 1 << worker, self.known
        for block_hash in published:
            before = holders.get(block_hash, 0)
            holders[block_hash] = before | bit
            if not before and (block := known.get(model, block_hash)) is not None:
                self._publish(block)
        for block_hash in dropped:
            if remaining := holders.pop(block_hash, 0) & ~bit:
                holders[block_hash] = remaining
            elif (block := known.get(model, block_hash)) is not None:
                self._remove(block)
        self._flush()

    def record_prompt(self, stream: TokenStream, prefix: PromptBlocks, block_sizes: Iterable[int]) -> None:
        prompt = stream.request.engine_request.prompt
        for block_size in block_sizes:
            if namespace := _namespace(stream, block_size):
                self.record(namespace, prefix.hashes(block_size), prompt)

    def record_answer(self, stream: TokenStream, prefix: PromptBlocks) -> None:
        prompt = stream.request.engine_request.prompt
        for block_size in prefix.block_sizes:
            if namespace := _namespace(stream, block_size):
                outputs = [
                    (prefix.hashes_after(block_size, output.tokens), pack(output.tokens))
                    for output in stream.outputs
                    if output.tokens
                ]
                self.record(namespace, prefix.hashes(block_size), prompt, outputs)

    def record(
        self,
        namespace: Namespace,
        hashes: Sequence[int],
        prompt: bytes,
        outputs: Sequence[tuple[Sequence[int], bytes]] = (),
    ) -> None:
        """Know the blocks of a prompt and of outputs after it; tokens have 4 bytes.

        ``hashes``   of the whole blocks of the prompt, from the first one on
        ``outputs``  each: hashes of the blocks behind those of the prompt, and the tokens of the output
        """
        new = self.known.add(namespace, hashes, prompt)
        if outputs:
            last = self.known.get(namespace.model, hashes[-1]) if hashes else None
            rest = prompt[len(hashes) * namespace.block_size * TOKEN_BYTES :]
            for following, tokens in outputs:
                new += self.known.add(namespace, following, rest + tokens, last)
            self.known.add(namespace, hashes, prompt)  # is used later than the blocks behind it
        for block in new:
            self._publish(block)
        for block in self.known.shrink():
            self._remove(block)
        self._flush()

    def subscribe(self, model: str, tenant: str, after: int) -> Subscription:
        return self._feed(model, tenant).subscribe(tenant, after)

    def close(self) -> None:
        self._is_closed = True
        for feed in self._feeds.values():
            feed.close()

    def _publish(self, block: KnownBlock) -> None:
        """Publish a block and those after it, as far as workers have them."""
        if block.parent is not None and not block.parent.is_published:
            return
        holders = self._holders.get(block.namespace.model, {})
        candidates = [block]
        while candidates:
            block = candidates.pop()
            if block.hash in holders and not block.is_published:
                block.is_published = True
                self._changed_feed(block).publish(block)
                candidates.extend(block.children)

    def _remove(self, block: KnownBlock) -> None:
        """Remove a block and those after it, which are useless without it."""
        candidates = [block]
        while candidates:
            block = candidates.pop()
            if block.is_published:
                block.is_published = False
                self._changed_feed(block).remove(block)
                candidates.extend(block.children)

    def _changed_feed(self, block: KnownBlock) -> EventFeed:
        feed = self._feed(block.namespace.model, block.namespace.tenant)
        self._changed.add(feed)
        return feed

    def _feed(self, model: str, tenant: str) -> EventFeed:
        feed = self._feeds.get((model, tenant))
        if feed is None:
            feed = self._feeds[model, tenant] = EventFeed(self.history)
            if self._is_closed:
                feed.close()
        return feed

    def _flush(self) -> None:
        while self._changed:
            self._changed.pop().flush()


def make_kv_events(limit_bytes: int | None, indexes: Mapping[str, PrefixIndex]) -> KvEvents:
    """Publish what the workers of ``indexes``, by model, report; None: nothing."""
    if limit_bytes is None:
        return NoKvEvents()
    publisher = KvEventPublisher(limit_bytes)
    publisher.follow(indexes)
    return publisher


def _namespace(stream: TokenStream, block_size: int) -> Namespace | None:
    """Return None for a sequence whose blocks are not published."""
    request = stream.request
    payload = request.payload
    if len(payload.cache.cache_salt) > MAX_SALT:
        return None
    return Namespace(
        model=request.engine_request.model,
        tenant=request.key.tenant,
        adapter=payload.lora_name,
        cache_salt=payload.cache.cache_salt,
        block_size=block_size,
    )
