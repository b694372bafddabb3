import pytest

from bench.scheduler_overhead import DEVICES, LaidOutDevice, Parts, RunningBatch, measure


@pytest.mark.parametrize("device", list(DEVICES))
def test_every_sequence_of_a_decode_batch_generates_a_token_per_step(device: str) -> None:
    batch = RunningBatch(DEVICES[device], 8, 128, churn=False)
    for _ in range(5):
        batch.step()
    sequences = batch.engine.scheduler.running
    assert len(sequences) == 8
    assert all(sequence.num_remaining == 1 for sequence in sequences)
    assert all(32 < len(sequence.tokens) < 160 for sequence in sequences)
    batch.engine.check_integrity()


@pytest.mark.parametrize("device", list(DEVICES))
def test_churn_keeps_as_many_running_while_sequences_end(device: str) -> None:
    batch = RunningBatch(DEVICES[device], 8, 128, churn=True)
    first = {sequence.id for sequence in batch.engine.scheduler.running}
    for _ in range(200):
        batch.step()
    sequences = batch.engine.scheduler.running
    assert len(sequences) + len(batch.engine.scheduler.waiting) == 8
    assert not first & {sequence.id for sequence in sequences}
    batch.engine.check_integrity()


def test_parts_are_timed_and_put_back() -> None:
    batch = RunningBatch(DEVICES["laid out"], 4, 64, churn=False)
    device = batch.engine.device
    assert isinstance(device, LaidOutDevice)
    with Parts(device.backend, "make_attention") as parts:
        batch.step()
        batch.step()
    assert len(parts.seconds["make_attention"]) == 2
    assert "make_attention" not in vars(device.backend)


def test_a_measurement_has_its_distribution() -> None:
    figures = measure("null", 4, 64, 10, churn=False)
    assert 0 < figures["median_step_ms"] <= figures["max_step_ms"]
