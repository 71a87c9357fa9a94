"""cupyflash.scores: each against the option that is the same, or its paper."""

import inspect
import math

import numpy as np
import pytest

import cupyflash
from cupyflash import attention, scores

RNG = np.random.default_rng(0)
HEADS, LENGTH = 4, 60
Q, K, V = RNG.normal(size=(3, 2, HEADS, LENGTH, 8))
ROWS, COLUMNS = np.arange(LENGTH)[:, None], np.arange(LENGTH)


def same(ours, **options):
    np.testing.assert_allclose(ours, attention(Q, K, V, **options), atol=1e-14)


def test_all_are_documented():
    for name in scores.__all__:
        assert len(inspect.getdoc(getattr(scores, name))) > 60
    assert cupyflash.scores is scores


def test_alibi():
    slopes = RNG.uniform(0.1, 1, HEADS)
    out = attention(Q, K, V, score=scores.alibi, score_arrays={"slopes": slopes})
    same(out, alibi_slopes=slopes)


def test_softcap():
    same(attention(Q, K, V, score=scores.softcap(0.7)), softcap=0.7)


def test_sliding_window():
    same(attention(Q, K, V, mask=scores.sliding_window(7)), window=(7, 0))
    same(attention(Q, K, V, mask=scores.sliding_window(3, 5)), window=(3, 5))


def test_prefix_lm():
    prefix = np.array([5, 30])
    out = attention(Q, K, V, mask=scores.prefix_lm, mask_arrays={"prefix": prefix})
    seen = (COLUMNS <= ROWS) | (prefix[:, None, None, None] > COLUMNS)
    same(out, mask=seen)


def test_document():
    documents = np.sort(RNG.integers(0, 4, (2, LENGTH)), axis=1)
    out = attention(Q, K, V, mask=scores.document, mask_arrays={"documents": documents})
    for b in range(2):  # each document alone gives the same
        for which in np.unique(documents[b]):
            at = documents[b] == which
            alone = attention(Q[b][:, at], K[b][:, at], V[b][:, at])
            np.testing.assert_allclose(out[b][:, at], alone, atol=1e-14)


def test_dilated_window():
    out = attention(Q, K, V, mask=scores.dilated_window(4, 3))
    seen = np.zeros((LENGTH, LENGTH), bool)
    for i in range(LENGTH):
        for step in range(5):
            if i - 3 * step >= 0:
                seen[i, i - 3 * step] = True
    same(out, mask=seen)


def test_neighborhood_2d():
    height, width, kernel = 6, 10, 5
    out = attention(Q, K, V, mask=scores.neighborhood_2d(height, width, kernel))
    seen = np.zeros((height, width, height, width), bool)
    for y in range(height):
        for x in range(width):
            top = min(max(y - kernel // 2, 0), height - kernel)
            left = min(max(x - kernel // 2, 0), width - kernel)
            seen[y, x, top : top + kernel, left : left + kernel] = True
    assert (seen.sum(axis=(2, 3)) == kernel**2).all()
    same(out, mask=seen.reshape(LENGTH, LENGTH))
    with pytest.raises(ValueError, match="kernel must be odd"):
        scores.neighborhood_2d(6, 10, 4)
    with pytest.raises(ValueError, match="at most the height"):
        scores.neighborhood_2d(6, 10, 7)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_bias(bidirectional):
    """Section 2.1 of the paper: half of the buckets for a distance each, the others
    up to the largest distance by its logarithm."""
    buckets, far = 16, 40
    table = RNG.normal(size=(buckets, HEADS))
    count = buckets // 2 if bidirectional else buckets
    exact = count // 2

    def bucket(distance):
        first = 0
        if bidirectional:
            first, distance = (count if distance > 0 else 0), abs(distance)
        else:
            distance = max(-distance, 0)
        if distance < exact:
            return first + distance
        share = math.log(distance / exact) / math.log(far / exact)
        return first + min(exact + int(share * (count - exact)), count - 1)

    bias = np.empty((HEADS, LENGTH, LENGTH))
    for i in range(LENGTH):
        for j in range(LENGTH):
            bias[:, i, j] = table[bucket(j - i)]
    out = attention(
        Q, K, V,
        score=scores.t5_bias(buckets, far, bidirectional),
        score_arrays={"table": table},
    )  # fmt: skip
    same(out, bias=bias)


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        ((32, 9, True), 8),
        ((32, 8, True), 8),
        ((8, 5, False), 4),
        ((8, 4, False), 4),
        ((4, 1, True), 1),
        ((2, 1, False), 1),
    ],
)
def test_t5_bias_of_a_small_max_distance(arguments, near):
    """A bucket each for what is near, and one for all from max_distance on."""
    buckets, far, bidirectional = arguments
    table = np.arange(buckets, dtype=float)[:, None] * np.ones(HEADS)
    one, found = np.zeros((1, 1, 1)), []
    for distance in range(30):  # one key alone: its score is the lse
        _, lse = attention(
            one, one, one,
            score=scores.t5_bias(*arguments), score_arrays={"table": table[:, :1]},
            query_offset=distance, return_lse=True,
        )  # fmt: skip
        found.append(int(lse[0, 0]))
    count = buckets // 2 if bidirectional else buckets
    assert found[:near] == list(range(near))
    assert set(found[far:]) == {count - 1}
    assert found == sorted(found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((32, 7), "max_distance must be at least 8, .* got 7"),
        ((32, 1), "max_distance must be at least 8, .* got 1"),
        ((8, 3, False), "max_distance must be at least 4, .* got 3"),
        ((3, 8), "num_buckets must be at least 4 with bidirectional=True, got 3"),
        ((1, 4, False), "num_buckets must be at least 2 .* got 1"),
        ((0,), "num_buckets must be at least 4 .* got 0"),
    ],
)
def test_t5_bias_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        scores.t5_bias(*arguments)
    with pytest.raises(TypeError, match="max_distance must be an int, got float"):
        scores.t5_bias(32, 128.0)


@pytest.mark.parametrize(
    ("make", "arguments", "error", "message"),
    [
        (scores.sliding_window, (-1,), ValueError, "left must be an int >= 0, got -1"),
        (scores.sliding_window, (1, -2), ValueError, "right must be an int >= 0"),
        (scores.sliding_window, (1.5,), TypeError, "left must be .* got float"),
        (scores.dilated_window, (2, 0), ValueError, "dilation must be an int >= 1"),
        (scores.dilated_window, (2, -1), ValueError, "dilation must be .* got -1"),
        (scores.dilated_window, (-1, 2), ValueError, "count must be .* got -1"),
        (scores.softcap, (0,), ValueError, "cap must be finite and > 0, got 0"),
        (scores.softcap, (-1.0,), ValueError, "cap must be finite and > 0, got -1"),
        (scores.softcap, (math.inf,), ValueError, "cap must be finite .* got inf"),
        (scores.softcap, ("x",), TypeError, "cap must be a real number"),
        (scores.softcap, (10**400,), ValueError, "cap is too large for float64"),
        (scores.neighborhood_2d, (2, 3, 1.0), TypeError, "kernel must be .* got float"),
        (scores.neighborhood_2d, (2, 3, True), TypeError, "kernel must be .* got True"),
        (scores.neighborhood_2d, (2.0, 3, 1), TypeError, "height must be .* got float"),
        (scores.neighborhood_2d, (2, "3", 1), TypeError, "width must be .* got str"),
        (scores.neighborhood_2d, (0, 3, 1), ValueError, "height must be .* got 0"),
        (scores.neighborhood_2d, (2, -3, 1), ValueError, "width must be .* got -3"),
        (scores.neighborhood_2d, (2, 3, -1), ValueError, "kernel must be .* got -1"),
        (scores.t5_bias, (8, 16, 1), TypeError, "bidirectional must be a bool.* int"),
        (scores.t5_bias, (8, 16, "no"), TypeError, "bidirectional must be a bool"),
        (scores.soft_nearest_neighbor, (0,), ValueError, "temperature must be finite"),
        (scores.soft_nearest_neighbor, (-1,), ValueError, "and > 0, got -1"),
        (scores.soft_nearest_neighbor, (math.nan,), ValueError, "and > 0, got nan"),
        (scores.soft_nearest_neighbor, (True,), TypeError, "must be a real number"),
        (
            scores.soft_nearest_neighbor,
            (np.ones(1),),
            TypeError,
            "temperature must be a real number, got ndarray",
        ),
    ],
)
def test_numbers_out_of_range(make, arguments, error, message):
    with pytest.raises(error, match=message):
        make(*arguments)


@pytest.mark.parametrize(
    ("make", "arguments", "like"),
    [
        (scores.sliding_window, (2**62, 10**400), (LENGTH, LENGTH)),
        (scores.dilated_window, (2**62, 2), (LENGTH, 2)),
        (scores.dilated_window, (10**400, 3), (LENGTH, 3)),
        (scores.dilated_window, (2, 2**62), (0, 1)),
        (scores.dilated_window, (2, 10**400), (0, 1)),
        (scores.neighborhood_2d, (10**400, 4, 3), (LENGTH, 4, 3)),
    ],
)
def test_distances_beyond_the_sequence(make, arguments, like):
    """Also where 64 bits do not hold them, or their product."""
    far = attention(Q[:, :, :40], K, V, mask=make(*arguments))
    near = attention(Q[:, :, :40], K, V, mask=make(*like))
    np.testing.assert_array_equal(far, near)


@pytest.mark.parametrize("kind", [np.int8, np.uint64, np.array])
def test_numbers_of_numpy(kind):
    same(
        attention(Q, K, V, mask=scores.neighborhood_2d(kind(6), kind(10), kind(5))),
        mask=scores.neighborhood_2d(6, 10, 5),
    )
    table = {"table": RNG.normal(size=(8, HEADS))}
    same(
        attention(
            Q, K, V,
            score=scores.t5_bias(kind(8), kind(16), np.True_), score_arrays=table,
        ),
        score=scores.t5_bias(8, 16), score_arrays=table,
    )  # fmt: skip


def test_t5_bias_of_a_max_distance_beyond_float64():
    table = {"table": RNG.normal(size=(8, HEADS))}
    far = scores.t5_bias(8, 10**400)
    same(
        attention(Q, K, V, score=far, score_arrays=table),
        score=scores.t5_bias(8, 10**300), score_arrays=table,
    )  # fmt: skip


def test_soft_nearest_neighbor():
    """Equation 1 of the paper, point by point."""
    points, labels = RNG.normal(size=(40, 5)), RNG.integers(0, 3, (1, 40))
    temperature = 2.0
    call = {
        "score": scores.soft_nearest_neighbor(temperature),
        "score_arrays": {"squares": (points**2).sum(axis=1)[None]},
        "scale": 1.0,
        "return_lse": True,
    }
    _, everyone = attention(points, points, points, **call)
    _, same_label = attention(
        points, points, points, **call,
        mask=scores.document, mask_arrays={"documents": labels},
    )  # fmt: skip
    differences = points[:, None] - points
    near = np.exp(-(differences**2).sum(axis=-1) / temperature)
    np.fill_diagonal(near, 0)
    of_label = labels[0][:, None] == labels[0]
    expected = np.log(near.sum(axis=1)) - np.log((near * of_label).sum(axis=1))
    np.testing.assert_allclose(everyone - same_label, expected, atol=1e-12)


def test_debye():
    """Debye's formula, with a head for each wave number."""
    atoms, factors = RNG.normal(size=(30, 3)), RNG.uniform(1, 8, (30, 1))
    waves = np.array([0.0, 0.3, 1.0, 5.0])
    heads = np.broadcast_to(atoms, (len(waves), 30, 3))
    out, lse = attention(
        heads, atoms[None], factors[None], scale=1.0, score=scores.debye,
        score_arrays={"squares": (atoms**2).sum(axis=1)[None], "q": waves},
        return_lse=True,
    )  # fmt: skip
    sums = np.exp(lse) * out[..., 0] - factors.sum()
    intensity = (sums * factors[:, 0]).sum(axis=1)
    distance = np.linalg.norm(atoms[:, None] - atoms, axis=-1)
    pairs = np.sinc(waves[:, None, None] * distance / np.pi)
    expected = (factors * factors[:, 0] * pairs).sum(axis=(1, 2))
    np.testing.assert_allclose(intensity, expected, rtol=1e-10)
