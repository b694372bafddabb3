import pytest

from bench.scheduler_overhead import DEVICES, LaidOutDevice, Parts, Scene, measure


@pytest.mark.parametrize("device", list(DEVICES))
def test_every_sequence_of_the_decode_scene_writes_a_token_a_step(device: str) -> None:
    scene = Scene(DEVICES[device], 8, 128, churn=False)
    for _ in range(5):
        scene.step()
    sequences = scene.engine.scheduler.running
    assert len(sequences) == 8
    assert all(sequence.remaining == 1 for sequence in sequences)
    assert all(32 < len(sequence.tokens) < 160 for sequence in sequences)
    scene.engine.check_integrity()


@pytest.mark.parametrize("device", list(DEVICES))
def test_churn_keeps_as_many_running_while_sequences_end(device: str) -> None:
    scene = Scene(DEVICES[device], 8, 128, churn=True)
    first = {sequence.id for sequence in scene.engine.scheduler.running}
    for _ in range(200):
        scene.step()
    sequences = scene.engine.scheduler.running
    assert len(sequences) + len(scene.engine.scheduler.waiting) == 8
    assert not first & {sequence.id for sequence in sequences}
    scene.engine.check_integrity()


def test_parts_are_timed_and_put_back() -> None:
    scene = Scene(DEVICES["laid out"], 4, 64, churn=False)
    device = scene.engine.device
    assert isinstance(device, LaidOutDevice)
    with Parts(device.backend, "make_attention") as parts:
        scene.step()
        scene.step()
    assert len(parts.seconds["make_attention"]) == 2
    assert "make_attention" not in vars(device.backend)


def test_a_measurement_has_its_distribution() -> None:
    figures = measure("null", 4, 64, 10, churn=False)
    assert 0 < figures["median_step_ms"] <= figures["max_step_ms"]
