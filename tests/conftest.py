"""One test body for NumPy and CuPy: the fixture `xp`, and the rules for GPU tests."""

import os
import zlib

import hypothesis
import numpy as np
import pytest
import workers


def _cupy_with_device():
    try:
        import cupy
    except ImportError:
        return None
    return cupy if cupy.is_available() else None


workers.take_turns()
CUPY = _cupy_with_device()
REQUIRE_GPU = os.environ.get("CUPYFLASH_REQUIRE_GPU") == "1"

# Examples are the same in every run; the fuzz is the place for new ones.
hypothesis.settings.register_profile(
    "cupyflash",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=60,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("cupyflash")


def pytest_addoption(parser):
    group = parser.getgroup("cupyflash")
    group.addoption(
        "--fuzz-problems",
        type=int,
        default=2000,
        help="random problems for each of attention and softmax (default 2000)",
    )
    group.addoption(
        "--fuzz-seconds",
        type=float,
        default=None,
        help="draw new random problems for so long, instead of a fixed number",
    )
    group.addoption(
        "--fuzz-seed",
        type=int,
        default=None,
        help="number of the first random problem of --fuzz-seconds (default: the time)",
    )
    group.addoption(
        "--thread-seconds",
        type=float,
        default=5.0,
        help="how long threads work side by side (default 5; 60 for the record)",
    )


def pytest_configure(config):
    if CUPY is not None and hasattr(config, "workerinput"):
        workers.compile_once(config.workerinput["testrunuid"])


def pytest_collection_modifyitems(items):
    if CUPY is not None or REQUIRE_GPU:
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


# A session's fixture, so that hypothesis may draw many examples under one value of it.
@pytest.fixture(
    scope="session", params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)]
)
def xp(request):
    """NumPy, and CuPy where there is a device."""
    if request.param == "numpy":
        return np
    return _require_cupy()


@pytest.fixture(scope="session")
def cupy():
    """CuPy, for tests that are marked gpu."""
    return _require_cupy()


def _require_cupy():
    import cupy

    cupy.cuda.runtime.getDeviceCount()  # an error, not a skip, where a GPU is required
    return cupy


@pytest.fixture
def rng(request):
    """A generator seeded by the name of the test."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
