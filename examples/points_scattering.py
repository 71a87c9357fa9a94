"""
Debye's formula as your own kernel
==================================

X-rays that meet molecules in all orientations scatter by Debye's formula,

.. math:: I(q) = \\sum_{ij} f_i f_j \\frac{\\sin(q r_{ij})}{q r_{ij}},

a sum over all pairs of atoms of a function of their distance. In
:mod:`cupyflash.points` the kernel may be such a function, even one that changes sign.
It is differentiated too, so you could fit a structure to a measured curve.

Data: adenylate kinase, from MDAnalysisTests. Compared with: NumPy on SciPy's list of
distances. It runs on NumPy arrays. Run it: ``python examples/points_scattering.py``
"""

import os
import warnings

import matplotlib.pyplot as plt
import MDAnalysis
import numpy as np
from _support import host_timed
from MDAnalysisTests.datafiles import DCD, PSF
from scipy.spatial.distance import pdist

from cupyflash import points

TINY = os.environ.get("CUPYFLASH_SIZE") == "tiny"
WAVES = np.linspace(0.02, 0.5, 5 if TINY else 25)  # in 1 / angstrom

warnings.filterwarnings("ignore", module="MDAnalysis")  # of its own next version
universe = MDAnalysis.Universe(PSF, DCD)
atoms = universe.select_atoms("name CA" if TINY else "not name H*")
places = atoms.positions.astype(np.float64)
electrons = {"C": 6.0, "N": 7.0, "O": 8.0, "S": 16.0}
factors = np.array([electrons[name[0]] for name in atoms.names])


# %%
# The kernel
# ----------
# With a bandwidth of 1 / q, d2 is the square of q r. Near 0 a series takes over.


def debye(d2):
    x = np.sqrt(np.maximum(d2, 1e-4))
    return np.where(d2 < 1e-4, 1 - d2 / 6, np.sin(x) / x)


def intensity(places, wave):
    """I(q) of one wave number."""
    sums = points.kernel_sum(places, places, factors, kernel=debye, bandwidth=1 / wave)
    return factors @ sums


curve, seconds = host_timed(lambda: [intensity(places, wave) for wave in WAVES])
print(f"{len(places):,} atoms, {len(WAVES)} wave numbers: {seconds:.2f} s")

# %%
# By the list of distances
# ------------------------


def by_list(wave):
    """The same from all distances at once."""
    upper = np.triu_indices(len(places), 1)
    pairs = factors[upper[0]] * factors[upper[1]]
    return (factors**2).sum() + 2 * pairs @ np.sinc(wave * pdist(places) / np.pi)


exact, seconds = host_timed(by_list, WAVES[-1])
print(f"with the list of distances: {seconds * len(WAVES):.2f} s")
np.testing.assert_allclose(curve[-1], exact, rtol=1e-6)

# %%
# The gradient
# ------------
# With respect to the positions of all atoms: how each would have to move to raise the
# curve at one q.

wave = WAVES[len(WAVES) // 2]
grads = points.kernel_sum_vjp(
    factors, places, places, factors, kernel=debye, bandwidth=1 / wave
)
forces = grads.dx + grads.dy
step = 1e-4 * forces / np.abs(forces).max()
raised = intensity(places + step, wave) - intensity(places - step, wave)
assert np.isclose(raised, 2 * (forces * step).sum(), rtol=1e-3)

fig, axis = plt.subplots(figsize=(5, 3), layout="constrained")
axis.semilogy(WAVES, curve)
axis.set(xlabel="q in 1 / angstrom", ylabel="intensity")
plt.show()
