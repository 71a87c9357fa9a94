"""Processes that are started once for all tests of this folder."""

import pytest
import ranks as support


@pytest.fixture(scope="session")
def ranks():
    with support.Ranks() as pool:
        yield pool
