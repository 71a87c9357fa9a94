"""As test_variants.py, of gradients by row mma, which has most."""

import fuzz_vjp  # noqa: F401  (its problems)
import pytest
import variants

pytestmark = pytest.mark.gpu

ROWS = ["mma"]


@pytest.mark.parametrize("first", variants.FIRST)
@pytest.mark.parametrize("row", ROWS)
def test_every_variant(cupy, monkeypatch, record_property, row, first):
    tried = variants.check(cupy, monkeypatch, "attention_vjp", row, first)
    record_property("cases", tried)
