"""A subscriber of KV events, as a gateway keeps what it receives."""

from __future__ import annotations

from dataclasses import dataclass, field

from decant.protos.vllm import common_pb2 as common


@dataclass
class ReceivedBlocks:
    """Blocks after the messages so far, by hash: all tokens from the sequence's start on.

    It asserts what the protocol promises: no gap in the numbers, parents before children, nothing stored twice.
    """

    sequence: int = 0
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    is_in_snapshot: bool = False

    def apply(self, message: common.KvEventBatch) -> None:
        if not message.HasField("snapshot"):
            assert not self.is_in_snapshot
            assert message.sequence_number == self.sequence + 1
        elif message.snapshot.index:
            assert message.sequence_number == self.sequence + 1
        self.sequence = message.sequence_number
        for event in message.events:
            self._apply_event(event)
        if message.HasField("snapshot"):
            self.is_in_snapshot = message.snapshot.index + 1 < message.snapshot.count
            if not self.is_in_snapshot:
                assert len(self.tokens) == message.snapshot.blocks

    def _apply_event(self, event: common.KvCacheEvent) -> None:
        match event.WhichOneof("data"):
            case "stored":
                parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
                for block in event.stored.blocks:
                    assert block.block_hash not in self.tokens
                    assert len(block.token_ids) == block.block_size
                    before = () if parent is None else self.tokens[parent]
                    self.tokens[block.block_hash] = (*before, *block.token_ids)
                    parent = block.block_hash
            case "removed":
                for block_hash in event.removed.block_hashes:
                    del self.tokens[block_hash]
            case _:
                self.tokens.clear()
