from __future__ import annotations

import os
from pathlib import Path

import pytest

from decant.command.deployment import deployments
from decant.command.deployment.deployments import Deployment, DeploymentRecord


def test_a_record_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    is_locked = deployments._is_locked
    with DeploymentRecord() as record:
        record.write(Deployment(os.getpid(), ("h:1",), "unix:///r"))
        newer = iter([Deployment(os.getpid(), ("h:2",), "unix:///r")])

        def replaced(descriptor: int) -> bool:
            for one in newer:
                record.write(one)
            return is_locked(descriptor)

        monkeypatch.setattr(deployments, "_is_locked", replaced)
        (found,) = deployments.running()
    assert found.addresses == ("h:2",)
