from pathlib import Path

import pytest

from decant.bench import model_shapes as shapes


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shapes.make("tiny", tmp_path_factory.mktemp("shapes") / "tiny")
