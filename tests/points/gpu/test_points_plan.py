"""Plans of points on a card that is not there: launches, memory, polynomials."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("cupy")

from cupyflash._cuda import device
from cupyflash._points import kernels
from cupyflash._points.gpu import (
    clouds,
    config,
    coverage,
    functions,
    plan,
    registry,
    series,
)

HOPPER = device.device_of_arch("sm_90a")


def pairs_of(reduction="logsumexp", columns=0, dim=3, size=1 << 20, **more):
    pairs = config.Pairs(
        reduction=reduction,
        batch=1,
        num_rows=size,
        num_keys=size,
        dim=dim,
        num_columns=columns,
        dtype="float32",
        kernel="gaussian",
        scale=1.0,
        coord_dtype="float32",
    )
    return clouds.sorted_where_worth(replace(pairs, **more))


def entries(pairs, card=HOPPER):
    return [c.variant.entry for c, _ in plan.steps(pairs, card).launches]


def test_every_kernel_has_a_row():
    """The names of kernels that the checks let through, and slopes of them."""
    assert set(config.KERNELS) == set(kernels.KERNELS)


@pytest.mark.parametrize("name", sorted(config.KERNELS))
def test_only_vanishing_kernels_are_skipped(name):
    """Kernels with an exponent fall below any bound within reach."""
    vanishes = abs(kernels.KERNELS[name].value(np.float64(1e4))) < 1e-20
    assert config.KERNELS[name].has_exponent == vanishes


@pytest.mark.parametrize(
    ("change", "row"),
    [
        ({}, "mma"),
        ({"size": 1000}, "direct"),
        ({"dim": 8}, "direct"),
        ({"dim": 9}, "products"),
        ({"dim": 9, "size": 100}, "direct"),
        ({"kernel": "cauchy"}, "direct"),
        ({"dtype": "float64", "coord_dtype": "float64"}, "direct"),
        ({"coord_dtype": "float64"}, "mma"),
    ],
    ids=str,
)
def test_the_row_of_a_call(change, row):
    found, _ = registry.select(pairs_of(**change), HOPPER)
    assert found.name == row


def test_tf32_is_one_part_of_each_coordinate():
    """For products alone; other kernels are those of float32."""
    products = {}
    for precision in ("float32", "tf32"):
        pairs = pairs_of(dim=64, precision=precision)
        steps = plan.steps(pairs, HOPPER)
        found = {
            c.variant.entry: dict(c.variant.defines)["PARTS"]
            for c, _ in steps.launches
            if c.variant.entry in ("points_parts", "points_products")
        }
        assert set(found.values()) == {"1" if precision == "tf32" else "2"}
        products[precision] = steps.scratch["key_parts"]
    assert 2 * products["tf32"] == products["float32"]
    few = pairs_of(dim=3)
    assert entries(replace(few, precision="tf32")) == entries(few)


def test_old_cards_take_differences():
    turing = device.device_of_arch("sm_75")
    for dim in (3, 20):
        row, refused = registry.select(pairs_of(dim=dim), turing)
        assert row.name == "direct"
        assert any("sm_80" in why for _, why in refused)


def function_pairs(power, reduction="mean", columns=2):
    kernel = kernels.find(lambda d2: (1 + d2) ** -power, reduction)
    text, numbers = functions.of(kernel, reduction != "kernel_sum")
    return pairs_of(reduction, columns, function=text, numbers=numbers)


def test_a_function_is_a_text_and_its_numbers():
    """Another number is another argument of the same kernel."""
    one, other = function_pairs(2.5), function_pairs(3.5)
    assert one.function == other.function
    assert one.numbers == np.float64(2.5).tobytes()
    assert other.numbers == np.float64(3.5).tobytes()
    assert function_pairs(2.5, "kernel_sum").function != one.function  # K, not log K
    row, refused = registry.select(one, HOPPER)
    assert row.name == "direct"
    assert len(refused) == len(registry.KERNELS) - 1
    assert not one.is_sorted
    launches = plan.steps(one, HOPPER).launches
    direct = [(c, a) for c, a in launches if c.variant.entry == "points_direct"]
    for launch, arguments in direct:
        assert launch.variant.generated == one.function
        assert arguments[-1] == one.numbers


def test_a_slope_skips_a_cusp():
    kernel = kernels.find(lambda d2: np.exp(-np.sqrt(d2)), "kernel_sum")
    slope, _ = kernels.slope_of(kernel)
    for row, flag in (kernel, "false"), (slope, "true"):
        text, _ = functions.of(row, False)
        assert f"caller_function_skips_cusp = {flag};" in text


def test_series_are_for_many_pairs_of_few_axes():
    assert entries(pairs_of()).count("points_series") == len(series.DEGREES)
    assert "points_series" not in entries(pairs_of(dim=4))
    assert "points_series" not in entries(pairs_of(size=10_000))


def test_float32_is_looked_over():
    """Every float32 plan but the one in float64 throughout ends with a repair."""
    assert entries(pairs_of())[-2:] == ["points_direct", "points_combine"]
    assert entries(pairs_of(size=100)).count("points_direct") == 1


def repair_of(pairs):
    """Switches of the launch that makes doubtful rows once more; None without one."""
    launches = [c.variant for c, _ in plan.steps(pairs, HOPPER).launches]
    direct = [v for v in launches if v.entry == "points_direct"]
    is_direct = registry.select(pairs, HOPPER)[0] is registry.DIRECT
    return dict(direct[-1].defines) if len(direct) > is_direct else None


@pytest.mark.parametrize("axes", [False, True])
def test_large_scores_of_float64_have_more_digits(axes):
    wide = {"dtype": "float64", "coord_dtype": "float64", "has_axis_scales": axes}
    for reduction, columns, size in (("logsumexp", 0, 9), ("mean", 3, 1 << 20)):
        found = repair_of(pairs_of(reduction, columns, size=size, **wide))
        assert (found["CAREFUL"], found["SCALED"]) == ("1", str(int(axes)))
    # Weights of these do not grow from a digit of a score.
    assert repair_of(pairs_of("mean", 3, kernel="cauchy", **wide)) is None
    assert repair_of(pairs_of())["CAREFUL"] == "0"


@pytest.mark.parametrize("dim", [3, 20])
@pytest.mark.parametrize("size", [100, 1 << 14])
def test_tiny_sums_of_float32_are_made_in_float64(dim, size):
    found = repair_of(pairs_of("kernel_sum", 1, dim, size, kernel="matern32"))
    assert found["SUM_T"] == "double"
    assert found["ACCUM_T"] == "float"


def test_a_scale_has_two_parts():
    """What 1 / bandwidth and log2(e) are rounded by is in the low one."""
    width = 0.3
    pairs = pairs_of(scale=1 / width, bandwidth=width)
    low = config.pack(pairs)[8:16]
    assert low == config.pack(pairs, scale=0.0)[8:16]
    exact = np.longdouble(1) / (
        2 * np.longdouble(width) ** 2 * np.log(np.longdouble(2))
    )
    found = np.longdouble(pairs.q_scale) + np.frombuffer(low)[0]
    assert abs(found / exact - 1) < 1e-18
    assert abs(pairs.q_scale / exact - 1) > 1e-18


@pytest.mark.parametrize(("precision", "clouds"), [("float32", 1), ("tf32", 2)])
def test_the_middle_is_found_by_many_blocks(precision, clouds):
    """CuPy's mean along the points keeps two blocks busy, for longer than all else."""
    steps = plan.steps(pairs_of(dim=64, size=100_000, precision=precision), HOPPER)
    grids = [c.grid for c, _ in steps.launches if c.variant.entry == "points_middle"]
    assert len(grids) == clouds
    assert all(math.prod(grid) > HOPPER.num_sms for grid in grids)


def test_memory_is_linear():
    """200,000 points of 64 axes, whose matrix would be 160 GB, in less than 1 GB."""
    sizes = {}
    for size in (100_000, 200_000):
        steps = plan.steps(pairs_of(dim=64, size=size), HOPPER)
        sizes[size] = sum(steps.scratch.values())
    assert sizes[200_000] < min(1 << 30, 2.2 * sizes[100_000])


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_120"])
def test_arguments_have_names_and_memory_is_enough(arch):
    """What any plan launches is found by LaunchSequence, and parts fit their memory."""
    card = device.device_of_arch(arch)
    for pairs in coverage._representative():
        steps = plan.steps(pairs, card)
        names = {*plan.INPUTS, "out", "lse", *steps.scratch}
        for launch, arguments in steps.launches:
            texts = {x for x in arguments if isinstance(x, str)}
            assert texts <= names, launch.variant.entry
            assert launch.variant.smem <= card.smem_optin
            assert launch.grid[1] < 1 << 16
        size = np.dtype(pairs.dtype).itemsize
        assert steps.scratch["parts"] * 8 == steps.scratch["refs"] * size * (
            pairs.num_sums
        )
        assert steps.cleared >= steps.scratch["facts"] + steps.scratch["redo"]


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("degree", series.DEGREES)
def test_a_series_is_the_exponential(degree, dim):
    """The sum of monomials is 2^(2 x.y) to the exponential unit's digits."""
    rng = np.random.default_rng(degree)
    x, y = rng.normal(size=(2, 500, dim))
    largest = series.reach(degree) / (2 * math.log(2))
    x *= rng.random((500, 1)) * largest / np.linalg.norm(x, axis=1, keepdims=True)
    y /= np.linalg.norm(y, axis=1, keepdims=True)
    total = np.zeros(500)
    terms = zip(
        series._exponents(degree, dim), series.coefficients(degree, dim), strict=True
    )
    for powers, coefficient in terms:
        monomial = np.ones(500)
        for axis in range(dim):
            monomial *= (x[:, axis] * y[:, axis]) ** powers[axis]
        total += coefficient * monomial
    exact = 2.0 ** (2 * (x * y).sum(axis=1))
    assert np.abs(total / exact - 1).max() < 2e-7
    assert len(series.coefficients(degree, dim)) == math.comb(degree + dim, dim)


@pytest.mark.parametrize("degree", series.DEGREES)
def test_a_cut_keeps_a_pair_of_tiles_within_reach(degree):
    for scale in (1e-3, 1.0, 700.0):
        product = math.sqrt(series.cut(degree, scale))  # of two reaches
        assert math.isclose(2 * math.log(2) * scale * product, series.reach(degree))


def test_splits_cover_the_keys():
    for size, blocks, wanted in itertools.product((1, 300, 99_999), (1, 50), (1, 500)):
        pairs = pairs_of(size=size)
        num, tiles = config.splits(pairs, blocks, wanted)
        assert num * tiles >= pairs.num_tiles > (num - 1) * tiles
