"""A plugin of pytest: SciPy's tests of its softmax family meet cupyflash's.

``python -m pytest -p scipy_suite --pyargs scipy.special.tests.test_logsumexp``, with
this folder on the path.
"""

import pytest

import cupyflash

_NAMES = ("softmax", "log_softmax", "logsumexp")

# Where this package differs on purpose, by words of a test's name, and why.
_DIFFERENT = {}


def pytest_collection_modifyitems(items):
    for module in {item.module for item in items}:
        for name in _NAMES:
            if hasattr(module, name):
                setattr(module, name, getattr(cupyflash, name))
    for item in items:
        for words, reason in _DIFFERENT.items():
            if words in item.name:
                item.add_marker(pytest.mark.skip(reason=reason))
