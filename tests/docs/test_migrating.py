"""What docs/guides/migrating.md says of other libraries, where they are installed."""

import numpy as np
import pytest

import cupyflash


@pytest.fixture
def operands(rng):
    """q, k, v of (batch, heads, sequence, dim): fewer queries than keys, grouped."""
    q = rng.standard_normal((2, 8, 5, 16))
    k, v = rng.standard_normal((2, 2, 2, 9, 16))
    return q, k, v


@pytest.mark.filterwarnings("ignore")  # theirs
class TestTorch:
    @pytest.fixture
    def sdpa(self):
        torch = pytest.importorskip("torch")

        def call(*arrays, attn_mask=None, **options):
            tensors = [torch.from_numpy(x) for x in arrays]
            if attn_mask is not None:
                options["attn_mask"] = torch.from_numpy(attn_mask)
            return torch.nn.functional.scaled_dot_product_attention(
                *tensors, enable_gqa=True, **options
            ).numpy()

        return call

    def test_causal_stands_at_the_top_left(self, sdpa, operands):
        ours = cupyflash.attention(*operands, causal=True, query_offset=0)
        np.testing.assert_allclose(ours, sdpa(*operands, is_causal=True), rtol=1e-9)

    def test_masks(self, sdpa, operands, rng):
        bias = rng.standard_normal((8, 5, 9))
        mask = rng.random((5, 9)) < 0.7
        mask[:, 0] = True
        ours = cupyflash.attention(*operands, mask=mask)
        np.testing.assert_allclose(ours, sdpa(*operands, attn_mask=mask), rtol=1e-9)
        ours = cupyflash.attention(*operands, bias=bias, scale=0.3)
        theirs = sdpa(*operands, attn_mask=bias, scale=0.3)
        np.testing.assert_allclose(ours, theirs, rtol=1e-9)


@pytest.mark.filterwarnings("ignore")
class TestJax:
    @pytest.fixture
    def dpa(self):
        jax = pytest.importorskip("jax")

        def call(q, k, v, **options):
            arrays = [x.swapaxes(1, 2).astype(np.float32) for x in (q, k, v)]
            with jax.default_matmul_precision("float32"):
                out = jax.nn.dot_product_attention(*arrays, **options)
            return np.asarray(out).swapaxes(1, 2)

        return call

    @pytest.mark.parametrize(
        ("theirs", "ours"),
        [
            ({"is_causal": True}, {"causal": True, "query_offset": 0}),
            (
                {"local_window_size": (2, 1)},
                {"window": (2, 1), "query_offset": 0},
            ),
            (
                {
                    "query_seq_lengths": np.array([3, 5]),
                    "key_value_seq_lengths": np.array([9, 4]),
                },
                {
                    "query_lengths": np.array([3, 5]),
                    "key_lengths": np.array([9, 4]),
                },
            ),
        ],
        ids=["causal", "window", "lengths"],
    )
    def test_options(self, dpa, operands, theirs, ours):
        expected = dpa(*operands, **theirs)
        out = cupyflash.attention(*operands, **ours)
        lengths = ours.get("query_lengths", [5, 5])
        for i, length in enumerate(lengths):
            np.testing.assert_allclose(
                out[i, :, :length], expected[i, :, :length], atol=1e-5
            )
            assert (out[i, :, length:] == 0).all()
