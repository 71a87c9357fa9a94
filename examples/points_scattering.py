"""
Debye's formula as your own kernel
==================================

X-rays that meet molecules in all orientations scatter by Debye's formula,

.. math:: I(q) = \\sum_{ij} f_i f_j \\frac{\\sin(q r_{ij})}{q r_{ij}},

a sum over all pairs of atoms of a function of their distance. In
:mod:`cupyflash.points` the kernel may be such a function, even one that changes sign.
It is differentiated too, so you could fit a structure to a measured curve.

Data: adenylate kinase, the trajectory ``adk_dims`` of Beckstein et al. (J. Mol. Biol.
394, 160, 2009), from MDAnalysisTests (licence LGPL). Compared with: NumPy on SciPy's
list of distances. It runs on NumPy arrays. Run it: ``python
examples/points_scattering.py``
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
SELECTIONS = ["name CA"] if TINY else ["name CA", "not name H*", "all"]
WAVES = np.linspace(0.02, 0.5, 5 if TINY else 25)  # in 1 / angstrom

warnings.filterwarnings("ignore", module="MDAnalysis")  # of its own next version
universe = MDAnalysis.Universe(PSF, DCD)
electrons = {"H": 1.0, "C": 6.0, "N": 7.0, "O": 8.0, "S": 16.0}


def protein(selection):
    """Positions of some atoms, and their electrons."""
    atoms = universe.select_atoms(selection)
    factors = np.array([electrons[name[0]] for name in atoms.names])
    return atoms.positions.astype(np.float64), factors


# %%
# The kernel
# ----------
# With a bandwidth of 1 / q, d2 is the square of q r. Near 0 a series takes over.


def debye(d2):
    x = np.sqrt(np.maximum(d2, 1e-4))
    return np.where(d2 < 1e-4, 1 - d2 / 6, np.sin(x) / x)


def intensity(places, factors, wave):
    """I(q) of one wave number."""
    sums = points.kernel_sum(places, places, factors, kernel=debye, bandwidth=1 / wave)
    return factors @ sums


def by_points(places, factors):
    """The curve, without a list of pairs."""
    return np.array([intensity(places, factors, wave) for wave in WAVES])


# %%
# Compared with the list of distances
# -----------------------------------
# SciPy computes the distances once, for all wave numbers. On two cores that is five
# times as fast for 214 atoms, and as fast for 1,656. With 3,341 atoms, the whole
# protein with its hydrogens, summing over the points is faster. The list takes 45 MB
# there, and 10 GB for 50,000 atoms.


def by_list(places, factors):
    """The curve from all distances in memory."""
    first, second = np.triu_indices(len(places), 1)
    products, distances = factors[first] * factors[second], pdist(places)
    of_pairs = [products @ np.sinc(wave * distances / np.pi) for wave in WAVES]
    return (factors**2).sum() + 2 * np.array(of_pairs)


for selection in SELECTIONS:
    places, factors = protein(selection)
    curve, seconds = host_timed(by_points, places, factors)
    exact, peer_seconds = host_timed(by_list, places, factors)
    print(f"{len(places):,} atoms, {len(WAVES)} wave numbers: {seconds:.3f} s, "
          f"with the list of distances {peer_seconds:.3f} s")  # fmt: skip
    np.testing.assert_allclose(curve, exact, rtol=1e-6)

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
raised = intensity(places + step, factors, wave)
raised -= intensity(places - step, factors, wave)
assert np.isclose(raised, 2 * (forces * step).sum(), rtol=1e-3)

fig, axis = plt.subplots(figsize=(5, 3), layout="constrained")
axis.semilogy(WAVES, curve)
axis.set(xlabel="q in 1 / angstrom", ylabel="intensity")
plt.show()
