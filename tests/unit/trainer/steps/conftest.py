"""Jobs in the test's own process."""

import pytest


@pytest.fixture(autouse=True)
def _tidy(own_process: None) -> None:
    """Undo the changes of ``init`` to the process after each test."""
