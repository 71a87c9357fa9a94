"""
Do two samples differ? A permutation test
=========================================

The energy distance between two samples is 0 if their distributions are the same. How
large it gets by chance is found by exchanging labels. Each permutation is a column of
weights, so the distances of all pairs are computed once for 64 permutations, and never
stored.

Data: handwritten digits from scikit-learn. Compared with: the matrix of distances, by
SciPy. Run it: ``python examples/points_permutations.py``
"""

import matplotlib.pyplot as plt
import numpy as np
from _support import choose, device_name, host_timed, timed, to_numpy, xp
from scipy.spatial.distance import cdist
from sklearn.datasets import load_digits

from cupyflash import points

PERMUTATIONS = choose(tiny=19, cpu=199, gpu=9999)

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
# By the matrix of distances
# --------------------------
# A few hundred images are so few that the matrix wins: use it while it fits in memory.
# It grows with the square of the sample; at 50,000 points it takes 20 GB.


def by_matrix(x, y, rng):
    """The square of the distance, and of permutations."""
    z = np.concatenate([x, y])
    distances, inside = cdist(z, z), np.arange(len(z)) < len(x)
    squares = []
    for labels in [inside, *(rng.permutation(inside) for _ in range(PERMUTATIONS))]:
        b = np.where(labels, 1 / len(x), -1 / len(y))
        squares.append(-b @ distances @ b)
    return np.sqrt(np.maximum(squares, 0))


exact, seconds = host_timed(by_matrix, x, y, np.random.default_rng(0))
np.testing.assert_allclose(float(test.statistic), exact[0], rtol=1e-9)
np.testing.assert_allclose(to_numpy(test.null_distribution), exact[1:], atol=1e-6)
print(f"with the matrix: {seconds:.2f} s, the same numbers")

# %%
# What chance gives
# -----------------

fig, axes = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
for axis, (name, test) in zip(axes, found.items(), strict=True):
    axis.hist(to_numpy(test.null_distribution), bins=30, color="0.7")
    axis.axvline(float(test.statistic), color="tab:red")
    axis.set(title=f"{name}, p = {test.pvalue:.3f}", xlabel="energy distance")
plt.show()
