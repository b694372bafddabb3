from __future__ import annotations

import pytest

from decant.protos import worker_pb2 as wire
from decant.worker.epochs import Epochs


def run(epoch: int, request: str = "t/a") -> wire.Run:
    return wire.Run(request=request, epoch=epoch, attempt=1)


@pytest.mark.rule("lower-epochs-refused", "worker/epochs.py:Epochs.check")
def test_a_lower_epoch_is_superseded_with_the_highest() -> None:
    epochs = Epochs()
    assert epochs.check(run(2)) is None
    assert epochs.check(run(2)) is None
    assert epochs.check(run(1)) == wire.Superseded(run=run(1), epoch=2)
    assert epochs.check(run(3)) is None
    assert epochs.check(run(2)) == wire.Superseded(run=run(2), epoch=3)
    assert epochs.check(run(1, "t/b")) is None


def test_a_new_owner_and_nothing_else_is_reported() -> None:
    calls = list[wire.Run]()
    epochs = Epochs()
    epochs.new_owners.subscribe(calls.append)
    for epoch in (1, 1, 3, 2, 3):
        epochs.check(run(epoch))
    assert calls == [run(3)]


@pytest.mark.rule("lower-epochs-refused", "worker/epochs.py:Epochs.hold", "worker/epochs.py:Epochs._remove")
def test_the_epoch_of_a_live_request_is_kept_however_long_it_is_not_named() -> None:
    now = 0.0
    epochs = Epochs(keep_s=10, clock=lambda: now)
    epochs.check(run(2))
    epochs.hold(run(2))
    epochs.hold(run(2))
    epochs.release(run(2))
    now = 1000.0
    assert epochs.check(run(1)) == wire.Superseded(run=run(1), epoch=2)
    epochs.check(run(3))
    epochs.release(run(2))
    now = 1009.0
    assert epochs.check(run(2)) == wire.Superseded(run=run(2), epoch=3), "its last run was released 9 s ago"
    now = 1020.0
    assert epochs.check(run(1)) is None, "it was named 11 s ago"


def test_only_so_many_epochs_are_kept_of_requests_that_are_not_live() -> None:
    epochs = Epochs(max_kept=10)
    for number in range(20):
        epochs.hold(run(2, f"t/live{number}"))
    for number in range(100):
        epochs.check(run(2, f"t/{number}"))
    assert len(epochs) == 30
    assert epochs.check(run(1, "t/live0")) is not None
    assert epochs.check(run(1, "t/99")) is not None
    assert epochs.check(run(1, "t/0")) is None


def test_a_live_request_has_one_payload() -> None:
    def named(digest: bytes) -> wire.Run:
        return wire.Run(request="t/a", epoch=1, attempt=1, digest=digest)

    epochs = Epochs()
    assert not epochs.is_other_request(named(b"one"))
    epochs.hold(named(b""))
    assert not epochs.is_other_request(named(b"two")), "an older router named no digest"
    epochs.hold(named(b"one"))
    assert epochs.is_other_request(named(b"two"))
    assert not epochs.is_other_request(named(b"one"))
    assert not epochs.is_other_request(named(b""))
    epochs.release(named(b""))
    epochs.release(named(b"one"))
    assert not epochs.is_other_request(named(b"two"))


def test_an_epoch_is_forgotten_when_its_request_is_not_named_for_long() -> None:
    now = 0.0
    epochs = Epochs(keep_s=10, clock=lambda: now)
    epochs.check(run(5))
    epochs.check(run(5, "t/other"))
    now = 9.0
    assert epochs.check(run(4)) is not None
    now = 18.0
    assert epochs.check(run(4)) is not None, "it was named 9 s ago"
    assert len(epochs) == 1, "the other was not"
    now = 30.0
    assert epochs.check(run(1)) is None
