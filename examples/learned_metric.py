"""
A metric learned by the gradient of attention
=============================================

Kernel regression weights neighbours by their distance, and the right distance can be
learned from the data [1]_. Here a matrix *A* maps all features before the distance is
taken, so that the weight of sample *j* for sample *i* is

.. math:: \\exp(-|A x_i - A x_j|^2 / 2).

The loss is the mean squared error of each sample, estimated from all the others (a mask
hides the sample itself). Its gradient with respect to *A* needs the gradients of
attention with respect to queries, keys and the bias of the keys, all in float64 and
without a matrix of all pairs in memory. `attention_vjp` gives them, and finite
differences agree.

Data: scikit-learn's ``load_diabetes()``, 442 patients with 10 features, of Efron et al.
[2]_, under scikit-learn's BSD licence. Compared with: the same with matrices in NumPy,
and scikit-learn for the loss (it has no gradient). Run it: ``python
examples/learned_metric.py``

.. [1] Weinberger and Tesauro, "Metric learning for kernel regression", AISTATS 2007.
.. [2] Efron, Hastie, Johnstone and Tibshirani, "Least angle regression", Annals of
       Statistics 32, 407, 2004.
"""

import matplotlib.pyplot as plt
import numpy as np
from _support import choose, device_name, host_timed, timed, to_numpy, xp
from sklearn.datasets import load_diabetes
from sklearn.neighbors import KNeighborsRegressor

import cupyflash

STEPS = choose(tiny=5, cpu=60, gpu=200)
SIZES = choose(tiny=[100, 600], cpu=[442, 5000], gpu=[442, 5000, 20_000])
WIDTH = 3.0  # of the kernel before learning, in standard deviations of a feature

features, progression = load_diabetes(return_X_y=True)
features = (features - features.mean(axis=0)) / features.std(axis=0)
progression = (progression - progression.mean()) / progression.std()
n, dim = features.shape
x, y = xp.asarray(features), xp.asarray(progression[:, None])
others = ~xp.eye(n, dtype=bool)

# %%
# Loss and gradient
# -----------------
# Expanding the square leaves dot products and a bias for each key. What all keys of a
# query share drops out. The bias depends on *A* as well. The mask is a function of
# positions, so it takes no memory either.


def other(i, j):
    return i != j


def loss_and_gradient(metric, x=x, y=y):
    """Mean squared leave-one-out error, and its gradient by the metric."""
    z = x @ metric
    options = {"scale": 1.0, "bias": -(z**2).sum(axis=1) / 2, "mask": other}
    out, lse = cupyflash.attention(z, z, y, return_lse=True, **options)
    dout = 2 * (out - y) / len(x)
    grads = cupyflash.attention_vjp(dout, z, z, y, out, lse, need_dbias=True, **options)
    dz = grads.dq + grads.dk - grads.dbias[:, None] * z
    return float(((out - y) ** 2).mean()), x.T @ dz


# %%
# The same numbers as scikit-learn and as finite differences
# ----------------------------------------------------------

start = xp.eye(dim) / WIDTH
(loss, gradient), seconds = timed(loss_and_gradient, start)

host_z = to_numpy(x @ start)
peer = KNeighborsRegressor(
    n_neighbors=n,
    weights=lambda d: np.where(d < 1e-6, 0, np.exp(-(d**2) / 2)),  # not the sample
    algorithm="brute",
).fit(host_z, progression)
estimate, peer_seconds = host_timed(peer.predict, host_z)
peer_loss = ((estimate - progression) ** 2).mean()

step, worst = 1e-5, 0.0
for i, j in [(0, 0), (2, 2), (8, 2), (3, 7)]:
    ends = []
    for sign in (1, -1):
        moved = start.copy()
        moved[i, j] += sign * step
        ends.append(loss_and_gradient(moved)[0])
    worst = max(worst, abs((ends[0] - ends[1]) / (2 * step) - float(gradient[i, j])))

print(f"{device_name()}: loss and gradient in {1e3 * seconds:.1f} ms")
print(f"scikit-learn, loss alone: {1e3 * peer_seconds:.1f} ms")
print(f"loss less scikit-learn's: {abs(loss - peer_loss):.1e}")
print(f"gradient less finite differences: {worst:.1e}")
assert abs(loss - peer_loss) < 1e-9
assert worst < 1e-8

# %%
# Compared with matrices
# ----------------------
# NumPy can do the same with matrices of all pairs. On two cores that takes about the
# same time for up to some 2,000 samples, and you could as well use it. With 5,000
# samples it takes two to three times as long as the fused gradient. With 50,000, each
# of its matrices would take 20 GB.
#
# For more samples than there are patients, patients are repeated, with some noise.


def by_matrices(metric, x, y):
    """The same, with the scores, their softmax and its gradient in memory."""
    z = x @ metric
    scores = z @ z.T - (z**2).sum(axis=1) / 2
    np.fill_diagonal(scores, -np.inf)
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    out = p @ y
    dout = 2 * (out - y) / len(x)
    ds = p * (dout @ y.T - (dout * out).sum(axis=1, keepdims=True))
    dz = ds @ z + ds.T @ z - ds.sum(axis=0)[:, None] * z
    return ((out - y) ** 2).mean(), x.T @ dz


rng = np.random.default_rng(0)
for size in SIZES:
    some = np.resize(features, (size, dim))
    some += 0.1 * rng.normal(size=some.shape) * (size > n)
    target = np.resize(progression, size)[:, None]
    (_, ours), seconds = timed(
        loss_and_gradient, start, x=xp.asarray(some), y=xp.asarray(target)
    )
    (_, theirs), peer_seconds = host_timed(by_matrices, to_numpy(start), some, target)
    error = abs(to_numpy(ours) - theirs).max() / abs(theirs).max()
    print(f"{size:,} samples: {1e3 * seconds:.1f} ms, matrices "
          f"{1e3 * peer_seconds:.1f} ms, gradients differ by {error:.0e}")  # fmt: skip
    assert error < 1e-10

# %%
# Learning
# --------
# Plain gradient descent. The share of the variance that is explained, leaving one out,
# grows well beyond what a single width for all features gives.

metric, losses = start, []
for _ in range(STEPS):
    loss, gradient = loss_and_gradient(metric)
    losses.append(loss)
    metric = metric - 0.2 * gradient

print(f"explained before: {1 - losses[0]:.3f}, learned: {1 - losses[-1]:.3f}")
assert losses[-1] < losses[0]

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
left.plot(1 - np.array(losses))
left.set(xlabel="step", ylabel="explained, leaving one out")
strength = np.linalg.norm(to_numpy(metric), axis=1)
right.bar(load_diabetes().feature_names, strength)
right.set(ylabel="weight of a feature")
plt.show()
