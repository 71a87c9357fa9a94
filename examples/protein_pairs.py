"""
Attention with a pair bias on a protein
=======================================

Networks for protein structures let residues attend to each other with a bias for each
pair, computed from what is known about the pair. Here that is its distance *d*: head
*h* takes :math:`-d_{ij} / \\ell_h` as bias, and so looks about :math:`\\ell_h` far.
Queries and keys are random projections of the residue types: this shows the computation
on real frames, and is not a trained model.

The frames are of adenylate kinase on its way from closed to open. Values are
coordinates, so each residue gets the centre of what it looks at. Its distance from that
centre is small inside the protein and large at the surface, and changes where domains
move. All frames are one call: the bias has shape (frame, head, residue,
residue).

Data: the trajectory ``adk_dims`` of Beckstein et al. (J. Mol. Biol. 394, 160, 2009),
from MDAnalysisTests (licence LGPL). Compared with: NumPy and SciPy. Run it: ``python
examples/protein_pairs.py``
"""

import warnings

import matplotlib.pyplot as plt
import MDAnalysis
import numpy as np
from _support import choose, device_name, host_timed, timed, to_numpy, xp
from MDAnalysisTests.datafiles import DCD, PSF
from scipy.special import softmax

import cupyflash

ATOMS = choose(tiny="name CA", cpu="name CA", gpu="backbone")
EVERY = choose(tiny=20, cpu=1, gpu=1)  # so many frames on
LENGTHS = np.array([2.0, 4.0, 8.0, 16.0])  # in angstrom, one for each head
DIM = 16

# %%
# Frames
# ------

warnings.filterwarnings("ignore", module="MDAnalysis")  # of its own next version
universe = MDAnalysis.Universe(PSF, DCD)
atoms = universe.select_atoms(ATOMS)
frames = np.array([atoms.positions for _ in universe.trajectory[::EVERY]])
frames -= frames.mean(axis=1, keepdims=True)
num_frames, num_atoms, _ = frames.shape
_, kinds = np.unique(atoms.resnames, return_inverse=True)
num_kinds = kinds.max() + 1

# %%
# One call for all frames and heads
# ---------------------------------

rng = np.random.default_rng(0)
projections = rng.standard_normal((2, len(LENGTHS), num_kinds, DIM))
q, k = projections.astype(np.float32)[:, :, kinds]  # (head, atom, dim)
v = frames[:, None]  # (frame, 1, atom, 3): the same values for each head
differences = frames[:, :, None] - frames[:, None]
distances = np.sqrt((differences**2).sum(axis=-1))
bias = -distances[:, None] / LENGTHS[:, None, None].astype(np.float32)

on_device = [xp.asarray(a) for a in (q, k, v, bias)]


def look(q, k, v, bias):
    """The centre of what each atom looks at, for each frame and head."""
    heads = bias.shape[1]
    v = xp.broadcast_to(v, (len(v), heads, *v.shape[2:]))
    return cupyflash.attention(q, k, v, bias=bias)


def look_by_scipy(q, k, v, bias):
    """The same with the matrices of scores and weights."""
    scores = q @ k.swapaxes(-1, -2) * np.float32(DIM**-0.5) + bias
    return softmax(scores, axis=-1) @ v


# %%
# Compared with SciPy
# -------------------
# SciPy needs the matrices of scores and of weights; both sides compute in float32. On
# two cores SciPy takes about 1.5 times as long for nine frames, and nearly three times
# as long for all of them, whose matrices no longer fit in a cache.

print(f"{device_name()}: {num_atoms} atoms, {len(LENGTHS)} heads")
for count in (max(1, num_frames // 10), num_frames):
    some = [q, k, v[:count], bias[:count]]
    centres, seconds = timed(look, *on_device[:2], *(a[:count] for a in on_device[2:]))
    result, peer_seconds = host_timed(look_by_scipy, *some)
    centres = to_numpy(centres)
    error = abs(centres - result).max()
    print(f"{count} frames: cupyflash {seconds:.4f} s, SciPy {peer_seconds:.4f} s")
    print(f"  largest difference: {error:.1e} angstrom, of coordinates to "
          f"{abs(v).max():.0f}")  # fmt: skip
    assert error < 1e-3
print(f"the weights, never stored, would take {bias.nbytes / 2**20:.0f} MiB")

# %%
# What moves
# ----------
# Left: the distance of each atom from the centre of what it looks at, minus its mean
# over the frames. Right: the weights of one head, from attention with the identity as
# values.

far = np.linalg.norm(centres[:, 2] - frames, axis=-1)
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
picture = left.imshow(
    (far - far.mean(axis=0)).T, aspect="auto", cmap="RdBu_r", vmin=-2, vmax=2
)
left.set(xlabel="frame", ylabel="atom", title=f"distance, {LENGTHS[2]:g} angstrom head")
figure.colorbar(picture, ax=left, label="angstrom")

identity = xp.eye(num_atoms, dtype=xp.float32)
weights = cupyflash.attention(
    on_device[0][2], on_device[1][2], identity, bias=on_device[3][0, 2]
)
weights = to_numpy(weights)
assert abs(weights.sum(axis=1) - 1).max() < 1e-5
right.imshow(np.sqrt(weights), cmap="magma")
right.set(xlabel="key", ylabel="query", title="root of the weights, first frame")

plt.show()
