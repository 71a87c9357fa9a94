"""
Do two samples differ? A permutation test
=========================================

The energy distance between two samples is 0 if their distributions are the same. How
large it gets by chance is found by exchanging labels. Each permutation is a column of
weights, so the distances of all pairs are computed once for 64 permutations, and never
stored.

Data: scikit-learn's ``load_digits()``, the optical digits of E. Alpaydin and C. Kaynak
(UCI, licence CC BY 4.0). Compared with: the matrix of distances, by SciPy. Run it:
``python examples/points_permutations.py``
"""

import matplotlib.pyplot as plt
import numpy as np
from _support import choose, device_name, host_timed, timed, to_numpy, xp
from scipy.spatial.distance import cdist
from sklearn.datasets import load_digits

from cupyflash import points

PERMUTATIONS = choose(tiny=19, cpu=199, gpu=9999)
SIZES = choose(tiny=[60, 120], cpu=[600, 3000], gpu=[600, 3000, 12_000])

# %%
# Digits of one kind, and of two
# ------------------------------
# The first half of the images of eights, in the order of the data, against the second
# half; and against nines.

images, labels = load_digits(return_X_y=True)
eights, nines = images[labels == 8], images[labels == 9]
half = len(eights) // 2
found = {}
for name, x, y in (
    ("eights, two halves", eights[:half], eights[half:]),
    ("eights and nines", eights[:half], nines[:half]),
):
    found[name], seconds = timed(
        points.energy_distance,
        xp.asarray(x),
        xp.asarray(y),
        permutations=PERMUTATIONS,
        rng=0,
    )
    test = found[name]
    print(f"{device_name()}, {name}: distance {float(test.statistic):.2f}, "
          f"p {test.pvalue:.4f}, {seconds:.2f} s")  # fmt: skip

# %%
# Compared with the matrix of distances
# -------------------------------------
# SciPy computes the matrix once, and NumPy multiplies it by all permutations at once.
# The same numbers come out, and as long as the matrix fits in memory this is the better
# way on a CPU: on two cores it was twice as fast for 20,000 points (16 s against 31 s)
# and more than that for fewer. The matrix grows with the square of the sample. At
# 50,000 points it takes 20 GB, and then you need the function.
#
# For larger samples than there are digits, digits are drawn again, with some noise.


def by_matrix(x, y, signs):
    """The distance of each way to label the points, which is a column of signs."""
    z = np.concatenate([x, y])
    counts = np.where(signs > 0, len(x), len(y))
    b = signs / counts
    return np.sqrt(np.maximum(-(cdist(z, z) @ b * b).sum(axis=0), 0))


rng = np.random.default_rng(1)
for size in SIZES:
    z = rng.choice(images, size) + 0.5 * rng.normal(size=(size, images.shape[1]))
    half = size // 2
    test, ours = timed(
        points.energy_distance,
        *map(xp.asarray, (z[:half], z[half:])),
        permutations=PERMUTATIONS,
        rng=0,
    )
    signs = np.ones((size, 1 + PERMUTATIONS))
    signs[half:] = -1
    signs[:, 1:] = rng.permuted(signs[:, 1:], axis=0)
    exact, theirs = host_timed(by_matrix, z[:half], z[half:], signs)
    print(f"{size:,} points: {ours:.3f} s, with the matrix {theirs:.3f} s")
    np.testing.assert_allclose(float(test.statistic), exact[0], rtol=1e-7)

# %%
# What chance gives
# -----------------

fig, axes = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
for axis, (name, test) in zip(axes, found.items(), strict=True):
    axis.hist(to_numpy(test.null_distribution), bins=30, color="0.7")
    axis.axvline(float(test.statistic), color="tab:red")
    axis.set(title=f"{name}, p = {test.pvalue:.3f}", xlabel="energy distance")
plt.show()
