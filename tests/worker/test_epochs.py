"""Who owns a request, as a worker sees it."""

from __future__ import annotations

from protos import worker_pb2 as wire
from worker.epochs import Epochs


def run(epoch: int, request: str = "t/a") -> wire.Run:
    return wire.Run(request=request, epoch=epoch, attempt=1)


def test_a_lower_epoch_is_superseded_and_told_the_highest() -> None:
    epochs = Epochs()
    assert epochs.check(run(2)) is None
    assert epochs.check(run(2)) is None
    assert epochs.check(run(1)) == wire.Superseded(run=run(1), epoch=2)
    assert epochs.check(run(3)) is None
    assert epochs.check(run(2)) == wire.Superseded(run=run(2), epoch=3)
    assert epochs.check(run(1, "t/b")) is None


def test_who_listens_hears_of_a_new_owner_alone() -> None:
    epochs, heard = Epochs(), list[wire.Run]()
    epochs.listeners.append(heard.append)
    for epoch in (1, 1, 3, 2, 3):
        epochs.check(run(epoch))
    assert heard == [run(3)]


def test_an_epoch_is_forgotten_when_nobody_names_its_request_for_long() -> None:
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
