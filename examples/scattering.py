"""
Small-angle scattering of a protein
===================================

X-rays that meet molecules in all orientations scatter by Debye's formula,

.. math:: I(q) = \\sum_{ij} f_i f_j \\frac{\\sin(q r_{ij})}{q r_{ij}},

a sum over all pairs of atoms at a distance *r* for each wave number *q*. Attention has
no option for that, but a score function can do it: with :math:`s_{ij} = x_i \\cdot x_j`
the score :math:`\\log(1 + \\sin(q r) / (q r))` is :func:`cupyflash.scores.debye`, heads
are wave numbers, and :math:`e^{\\mathrm{lse}_i} \\mathrm{out}_i` is the inner sum. The
matrices of distances are never built.

**When not to use this.** The page shows what score functions can do. While the
distances of all pairs fit in memory, SciPy's list of them is the better way on a CPU:
it visits each pair once, and on two cores it was five to seven times as fast, for 214
atoms as for 1,656. The list takes 11 MB for 1,656 atoms, and 10 GB for 50,000. Where it
no longer fits, a kernel of your own in :mod:`cupyflash.points` does the same sum in a
quarter of the time, as :doc:`another page <points_scattering>` shows.

The first and the last frame of adenylate kinase, closed and open: the open one is
larger, and its curve falls earlier. For small *q* the curve tells the size, by
Guinier's law: :math:`I(q) \\approx I(0) \\exp(-q^2 R^2 / 3)` with the radius of
gyration *R*.

Data: the trajectory ``adk_dims`` of Beckstein et al. (J. Mol. Biol. 394, 160, 2009),
from MDAnalysisTests (licence LGPL). Compared with: SciPy. It runs on NumPy arrays. Run
it: ``python examples/scattering.py``
"""

import os
import warnings

import matplotlib.pyplot as plt
import MDAnalysis
import numpy as np
from _support import host_timed
from MDAnalysisTests.datafiles import DCD, PSF
from scipy.spatial.distance import pdist

from cupyflash import attention, scores

TINY = os.environ.get("CUPYFLASH_SIZE") == "tiny"
ATOMS = "name CA" if TINY else "not name H*"
WAVES = np.linspace(0.005, 0.5, 6 if TINY else 24)  # in 1 / angstrom

# %%
# Two frames
# ----------

warnings.filterwarnings("ignore", module="MDAnalysis")  # of its own next version
universe = MDAnalysis.Universe(PSF, DCD)
atoms = universe.select_atoms(ATOMS)
frames = [atoms.positions.astype(np.float64) for _ in universe.trajectory[::97]]
frames = [x - x.mean(axis=0) for x in (frames[0], frames[-1])]
electrons = {"C": 6.0, "N": 7.0, "O": 8.0, "S": 16.0}
factors = np.array([electrons[name[0]] for name in atoms.names])


def scattering(places, factors, waves):
    """I(q), with a head for each wave number."""
    heads = np.broadcast_to(places, (len(waves), *places.shape))
    out, lse = attention(
        heads,
        places[None],
        factors[None, :, None],
        scale=1.0,
        score=scores.debye,
        score_arrays={"squares": (places**2).sum(axis=1)[None], "q": waves},
        return_lse=True,
    )
    inner = np.exp(lse) * out[..., 0] - factors.sum()
    return inner @ factors


def by_scipy(places, factors, waves):
    """The same with all distances in memory."""
    first, second = np.triu_indices(len(places), 1)
    products, distances = factors[first] * factors[second], pdist(places)
    of_pairs = [products @ np.sinc(wave * distances / np.pi) for wave in waves]
    return (factors**2).sum() + 2 * np.array(of_pairs)


# %%
# Few atoms and many
# ------------------

alpha = atoms.names == "CA"
few = frames[0][alpha], factors[alpha]
curves = []
for name, places, weights in (
    ("closed, carbons of the backbone", *few),
    ("closed", frames[0], factors),
    ("open", frames[1], factors),
):
    curve, seconds = host_timed(scattering, places, weights, WAVES)
    expected, peer_seconds = host_timed(by_scipy, places, weights, WAVES)
    error = abs(curve / expected - 1).max()
    print(
        f"{name}: {len(places):,} atoms, {len(WAVES)} wave numbers: cupyflash "
        f"{seconds:.3f} s, SciPy {peer_seconds:.3f} s, largest difference {error:.0e}"
    )
    assert error < 1e-8
    curves.append(curve)
curves = curves[1:]

# %%
# The size of the molecule
# ------------------------

for name, places, curve in zip(("closed", "open"), frames, curves, strict=True):
    centre = factors @ places / factors.sum()
    squares = ((places - centre) ** 2).sum(axis=1)
    of_places = np.sqrt(factors @ squares / factors.sum())
    of_curve = np.sqrt(3 * np.log(factors.sum() ** 2 / curve[0])) / WAVES[0]
    print(f"{name}: {of_places:.2f} angstrom by its atoms, {of_curve:.2f} by its curve")
    assert abs(of_curve / of_places - 1) < 1e-2

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for name, curve in zip(("closed", "open"), curves, strict=True):
    left.semilogy(WAVES, curve / curve[0], label=name)
    right.plot(WAVES, WAVES**2 * curve / curve[0], label=name)
left.set(xlabel="q (1 / angstrom)", ylabel="I(q) / I(0)", title="scattering")
right.set(xlabel="q (1 / angstrom)", ylabel="q^2 I(q) / I(0)", title="Kratky's plot")
left.legend()

plt.show()
