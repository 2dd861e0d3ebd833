"""Tiny checkpoints and one compiled engine for the whole run."""

import pytest

from jaxpaged.core.draft_pace import DraftPace
from tests.support import engines, models


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in models.NAMES:
        models.write_model(name, folder)
    return folder


@pytest.fixture(scope="session")
def parts_r(model_folder):
    """Model R: random, its answers depend on the whole context."""
    return engines.tiny_parts(model_folder / "R")


@pytest.fixture(scope="session")
def parts_s(model_folder):
    """Model S: after token t comes t + 1, with known log-probabilities."""
    return engines.tiny_parts(model_folder / "S")


@pytest.fixture
def steady_pace(monkeypatch):
    """Who drafts is not decided by how long steps take on a busy machine."""
    monkeypatch.setattr(DraftPace, "took", lambda *_: None)
