"""
Retrieval of half-erased faces
==============================

A modern Hopfield network [1]_ stores patterns as they are. From a damaged pattern
:math:`\\xi` it moves to :math:`X^T \\mathrm{softmax}(\\beta X \\xi)`, which is
attention with the stored patterns as keys and as values. No step raises the energy

.. math:: E = -\\tfrac{1}{\\beta} \\mathrm{lse}(\\beta X \\xi)
          + \\tfrac{1}{2} |\\xi|^2,

whose first term contains the lse that attention returns. A large :math:`\\beta` recalls
one pattern, a small one a mean of many.

Data: ``skimage.data.lfw_subset()``, 200 patches of 25 x 25: 100 faces and 100 others,
from Labeled Faces in the Wild [2]_, which was published for research and states no
licence. Compared with: NumPy and SciPy. Run it: ``python examples/face_retrieval.py``

.. [1] Ramsauer et al., "Hopfield networks is all you need", ICLR 2021.
.. [2] Huang et al., "Learning to align from scratch", NIPS 2012.
"""

import matplotlib.pyplot as plt
import numpy as np
from _support import choose, device_name, host_timed, timed, to_numpy, xp
from scipy.special import logsumexp, softmax
from skimage import data

import cupyflash

TRIALS = choose(tiny=1, cpu=10, gpu=50)  # different noise on each pattern
SIZES = choose(tiny=[20, 200], cpu=[20, 200, 2000, 20_000], gpu=[200, 2000, 20_000])
BETAS = np.array([2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0])
STEPS = 3
NOISE = 0.02  # of each pixel; patterns have length 1, a pixel is about 0.04

# %%
# Patterns and damage
# -------------------
# Patches minus their mean, with length 1. The lower half is lost, and the rest is
# noisy.

patches = data.lfw_subset().reshape(200, -1)
stored = patches - patches.mean(axis=1, keepdims=True)
stored /= np.linalg.norm(stored, axis=1, keepdims=True)
rng = np.random.default_rng(0)
damaged = stored + NOISE * rng.standard_normal((TRIALS, *stored.shape))
damaged[..., damaged.shape[-1] // 2 :] = 0

# %%
# Three steps for every beta
# --------------------------


def retrieve(state, patterns, beta):
    """States after some steps, and the energy before each."""
    energies = []
    for _ in range(STEPS):
        new, lse = cupyflash.attention(
            state, patterns, patterns, scale=beta, return_lse=True
        )
        energies.append(-lse / beta + (state**2).sum(axis=-1) / 2)
        state = new
    return state, xp.stack(energies)


def retrieve_by_scipy(state, patterns, beta):
    """The same as two formulas and a matrix of scores."""
    energies = []
    for _ in range(STEPS):
        scores = beta * state @ patterns.T
        lse = logsumexp(scores, axis=-1)
        energies.append(-lse / beta + (state**2).sum(axis=-1) / 2)
        state = softmax(scores, axis=-1) @ patterns
    return state, np.stack(energies)


def recalled(state):
    """Which states are nearest to the pattern they started from."""
    return (state @ stored.T).argmax(axis=-1) == np.arange(len(stored))


patterns = xp.asarray(stored, dtype=xp.float32)
state = xp.asarray(damaged, dtype=xp.float32).reshape(-1, stored.shape[1])
exact_state = damaged.reshape(state.shape)
print(f"{device_name()}: {len(state):,} damaged patterns, {STEPS} steps")
print("  beta  recalled  closeness      ours     SciPy  difference  of energy")
closeness = []
for beta in BETAS.tolist():
    (result, energies), seconds = timed(retrieve, state, patterns, beta)
    (expected, exact), peer_seconds = host_timed(
        retrieve_by_scipy, exact_state, stored, beta
    )
    error = abs(to_numpy(result) - expected).max()
    energy_error = abs(to_numpy(energies) - exact).max()
    final = to_numpy(result).reshape(damaged.shape)
    closeness.append((final * stored).sum(axis=-1).mean())
    print(
        f"{beta:6g}  {recalled(final).mean():8.1%}  {closeness[-1]:9.3f}"
        f"{seconds:8.3f} s{peer_seconds:8.3f} s  {error:10.1e}  {energy_error:9.1e}"
    )
    assert error < 1e-2  # near a tie of two patterns, a step makes errors larger
    assert (np.diff(exact, axis=0) < 1e-12).all()

# %%
# Few patterns and many
# ---------------------
# The time of one recall, in float32 on both sides. On two cores there is little to gain
# up to a few hundred damaged patterns, and SciPy is all you need. With 2,000 cupyflash
# is ahead, and with 20,000 it takes half the time.

for count in SIZES:
    some = np.resize(exact_state, (count, stored.shape[1])).astype(np.float32)
    _, ours = timed(retrieve, xp.asarray(some), patterns, 20.0)
    _, theirs = host_timed(retrieve_by_scipy, some, stored.astype(np.float32), 20.0)
    print(f"{count:6,} damaged patterns: {ours:.4f} s, SciPy {theirs:.4f} s")

# %%
# Pictures
# --------
# With a small beta every state becomes the mean of all patterns. From some beta on, the
# lost half comes back.

shown, picked = (3, 40, 77, 150), (1, 3, 6)
figure, axes = plt.subplots(
    len(shown), 2 + len(picked), figsize=(7.5, 6), layout="constrained"
)
columns = [("stored", stored), ("damaged", damaged[0])]
for i in picked:
    result, _ = retrieve(xp.asarray(damaged[0], xp.float32), patterns, BETAS[i])
    columns.append((f"beta = {BETAS[i]:g}", to_numpy(result)))
for column, (title, images) in zip(axes.T, columns, strict=True):
    column[0].set_title(title)
    for axis, i in zip(column, shown, strict=True):
        axis.imshow(images[i].reshape(25, 25), cmap="gray", vmin=-0.1, vmax=0.1)
        axis.set_axis_off()

plt.show()
