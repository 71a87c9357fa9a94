"""One test body for NumPy and CuPy: the fixture `xp`, and the rules for GPU tests."""

import os
import zlib

import gpu_record
import hypothesis
import launched
import numpy as np
import pytest
import workers


def _cupy_with_device():
    try:
        import cupy
    except ImportError:
        return None
    return cupy if cupy.is_available() else None


# Importing these replaces CuPy: not for doctests.
collect_ignore = ["support/emulation/plugin.py"]

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
        default=1200,
        help="random problems of each operation (default 1200)",
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
        help="number of the first random problem (default: the day's)",
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
    if CUPY is not None:
        from cupyflash._cuda import launch

        WATCH.over(launch.Launch)


# Kernels that tests launch, for the record: each is told once, by a test that passed.
WATCH = launched.Watch()
_told: set[str] = set()


def pytest_runtest_setup(item):
    WATCH.begin()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    file = gpu_record._file(item.nodeid)
    if call.when == "call" and report.passed and file not in gpu_record.COMPARE_NOTHING:
        fresh = WATCH.names - _told
        _told.update(fresh)
        if fresh:
            report.user_properties.append(("variants", " ".join(sorted(fresh))))
    return report


def pytest_deselected(items):
    """Let the record know, which does not see what the workers of xdist leave out."""
    for item in items:
        if item.get_closest_marker("gpu") and hasattr(item.config, "workeroutput"):
            item.config.workeroutput.setdefault("deselected", []).append(item.nodeid)


def pytest_collection_modifyitems(items):
    if CUPY is not None or REQUIRE_GPU:
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
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
    # Without its folders: a test that moves to another one keeps its numbers.
    path, _, test = request.node.nodeid.partition("::")
    name = f"tests/{path.rpartition('/')[2]}::{test}"
    return np.random.default_rng(zlib.crc32(name.encode()))
