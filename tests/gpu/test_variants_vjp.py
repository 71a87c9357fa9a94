"""As test_variants.py, of gradients but row mma, which has a file of its own."""

import fuzz_vjp  # noqa: F401  (its problems)
import pytest
import variants

pytestmark = pytest.mark.gpu

ROWS = [row for row in variants.WHOLE["attention_vjp"] if row != "mma"]


@pytest.mark.parametrize("first", variants.FIRST)
@pytest.mark.parametrize("row", ROWS)
def test_every_variant(cupy, monkeypatch, record_property, row, first):
    tried = variants.check(cupy, monkeypatch, "attention_vjp", row, first)
    record_property("cases", tried)
