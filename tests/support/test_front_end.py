"""Kernels that random calls choose compile: other calls each day."""

import dataclasses
import itertools

import front_end
import pytest
from test_fuzz import first_of

from cupyflash._cuda.device import device_of_arch
from cupyflash._cuda.kernel import Variant


@pytest.fixture(autouse=True, scope="module")
def compiler():
    if why := front_end.unusable():
        pytest.skip(why)


@pytest.mark.parametrize("operation", ["attention", "attention_vjp", "softmax"])
def test_kernels_that_random_calls_choose(operation, request):
    problems = front_end.draws([operation], first_of(request.config))
    seen = set()
    wrong = list(
        front_end.errors(itertools.islice(problems, 40), front_end.ARCHS, seen)
    )
    assert not wrong, "\n".join(map(str, wrong[0]))
    assert seen


def test_what_does_not_compile_is_found():
    numbers = {"BATCH_DIMS": 1, "NUM_THREADS": 256}
    defines = tuple((name, str(n)) for name, n in numbers.items())
    good = Variant("attention/score/mask_words.cu", "attention_mask_words", defines)
    device = device_of_arch("sm_90a")
    assert not front_end.error_of(good, device)
    bad = dataclasses.replace(good, defines=defines[:1])
    assert "error" in front_end.error_of(bad, device)
