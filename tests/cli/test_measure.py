"""The clock of the benchmarks."""

import time

import pytest

from cupyflash._cli import measure


def test_turns_rotate(monkeypatch):
    """Each candidate is once the first, once the last."""
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    timings = measure.interleaved(calls, on_gpu=False, turns=3)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    assert all(t.best <= t.seconds <= t.worst for t in timings.values())


@pytest.mark.gpu
def test_the_host_does_not_count():
    """A call that is slow to enqueue is no slower on the device."""
    cupy = pytest.importorskip("cupy")
    x = cupy.zeros(1 << 10, cupy.float32)

    def slow():
        time.sleep(3e-4)
        x.fill(1)

    calls = {"slow": slow, "fast": lambda: x.fill(1)}
    timings = measure.interleaved(calls, on_gpu=True, turns=3)
    assert timings["slow"].seconds < 1e-4
    assert timings["slow"].seconds < 2 * timings["fast"].seconds
