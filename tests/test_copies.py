"""Copies and pickles of what public functions return."""

import copy
import pickle

import numpy as np
import pytest

import cupyflash
from cupyflash import distributed, points, scores

RNG = np.random.default_rng(0)
X, Y, V = RNG.normal(size=(30, 3)), RNG.normal(size=(20, 3)), RNG.normal(size=(20, 2))
Q = RNG.normal(size=(1, 2, 6, 4))


def by_cloudpickle(x):
    return pickle.loads(pytest.importorskip("cloudpickle").dumps(x))


WAYS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "protocol 2": lambda x: pickle.loads(pickle.dumps(x, 2)),
    "cloudpickle": by_cloudpickle,
}


def of_transport(found):
    return (
        found.value, found.f, found.error, *found.gradient(), found.barycenters(),
        found.plan @ V, found.plan.T.marginal(),
    )  # fmt: skip


def of_divergence(found):
    return found.value, *of_transport(found.xy), *found.gradient()


def of_operator(found):
    return found @ V, found.T @ X, (2 * found).H @ X, found.diagonal


def grads():
    out, lse = cupyflash.attention(Q, Q, Q, return_lse=True)
    return cupyflash.attention_vjp(Q, Q, Q, Q, out, lse)


# name -> (how it is made, all that it says)
OBJECTS = {
    "Transport": (lambda: points.sinkhorn(X, Y, epsilon=0.5), of_transport),
    "Plan": (
        lambda: points.sinkhorn(X, Y, epsilon=0.5).plan.T,
        lambda found: (found @ X, found.T.means(V), np.array(found.shape)),
    ),
    "Divergence": (
        lambda: points.sinkhorn_divergence(X, Y, epsilon=0.5), of_divergence,
    ),
    "KernelOperator": (lambda: points.KernelOperator(X, Y, kernel="matern32"),
                       of_operator),
    "adjoint": (lambda: points.KernelOperator(Y, X, bandwidth=0.5).H, of_operator),
    "preconditioner": (
        lambda: points.KernelOperator(X, X, diagonal=0.1).preconditioner(5, rng=0),
        lambda found: (found @ X, found.H @ X),
    ),
    "GaussianKDE": (
        lambda: points.GaussianKDE(X.T),
        lambda found: (found(Y.T), found.covariance, found.factor),
    ),
    "MeanShift": (
        lambda: points.mean_shift(X, bandwidth=1.0),
        lambda found: (found.labels, found.cluster_centers),
    ),
    "TwoSampleTest": (
        lambda: points.mmd(X, Y, permutations=20, rng=0),
        lambda found: (found.statistic, found.pvalue),
    ),
    "PointsGrads": (lambda: points.kernel_sum_vjp(X @ X.T[:, :2], X, Y, V), tuple),
    "AttentionGrads": (grads, lambda found: found[:3]),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OBJECTS)
def test_copies_say_the_same(name, way):
    make, all_of = OBJECTS[name]
    original = make()
    found = WAYS[way](original)
    assert found is not original or isinstance(original, tuple)
    assert type(found) is type(original)
    for one, other in zip(all_of(found), all_of(original), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_knows_that_its_clouds_are_one(way):
    original = points.KernelOperator(X, X, diagonal=0.1)
    found = WAYS[way](original)
    assert found.x is found.y
    for operator in found, found.H:
        mine = operator.preconditioner(5, rng=0) @ X
        np.testing.assert_array_equal(mine, original.preconditioner(5, rng=0) @ X)


class Named(points.KernelOperator):
    """A user's class."""


@pytest.mark.parametrize("way", WAYS)
def test_a_class_of_a_user(way):
    original = Named(X, Y)
    original.name = "mine"
    found = WAYS[way](original)
    assert type(found) is Named
    assert found.name == "mine"
    np.testing.assert_array_equal(found @ V, original @ V)


def test_kernel_functions_are_pickled_as_others_are():
    original = points.KernelOperator(X, Y, kernel=lambda d2: np.exp(-d2))
    found = by_cloudpickle(original)
    np.testing.assert_array_equal(found @ V, original @ V)


@pytest.mark.parametrize(
    "make",
    [
        lambda: scores.softcap(2.0),
        lambda: scores.t5_bias(8, 16),
        lambda: scores.soft_nearest_neighbor(2.0),
        lambda: scores.sliding_window(2),
        lambda: scores.dilated_window(2, 2),
        lambda: scores.neighborhood_2d(2, 3, 1),
    ],
)
def test_functions_of_scores_by_cloudpickle(make):
    """Which traces as the original does, where it arrives."""
    given = {"table": RNG.normal(size=(8, 2)), "squares": (Q**2).sum(axis=-1)[:, 0]}

    def call(function):
        code = function.__code__
        names = code.co_varnames[code.co_argcount :][: code.co_kwonlyargcount]
        kind = "score" if "s" in code.co_varnames[: code.co_argcount] else "mask"
        named = {n: given[n] for n in names}
        options = {kind: function, f"{kind}_arrays": named or None}
        return cupyflash.attention(Q, Q, Q, **options)

    np.testing.assert_array_equal(call(by_cloudpickle(make())), call(make()))


@pytest.mark.parametrize("way", WAYS)
def test_open_connections_are_not_copied(way):
    with distributed.connect() as comm:
        with pytest.raises(
            TypeError, match=r"neither copied nor pickled.* connect\(\)"
        ):
            WAYS[way](comm)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_copies_of_what_is_on_a_gpu(cupy, way):
    x, y, v = map(cupy.asarray, (X, Y, V))
    for original, all_of in (
        (points.KernelOperator(x, y), lambda found: [found @ v]),
        (points.sinkhorn(x, y, epsilon=0.5), lambda found: [found.plan @ v, found.f]),
        (
            points.KernelOperator(x, x, diagonal=0.1),
            lambda found: [found.preconditioner(5, rng=0) @ x],
        ),
    ):
        found = WAYS[way](original)
        for one, other in zip(all_of(found), all_of(original), strict=True):
            np.testing.assert_allclose(cupy.asnumpy(one), cupy.asnumpy(other), 1e-13)
