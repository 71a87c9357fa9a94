"""
Transport between two clouds, balanced and not
==============================================

The colours of one photograph are moved to those of another at least cost, by
:func:`cupyflash.points.sinkhorn`. The plan has an entry for each pair of colours and is
never stored: it is applied to values, and found by updates that are each one log-sum
over the other cloud.

Data: ``china.jpg`` and ``flower.jpg`` of scikit-learn. Peer: POT, whose log-domain
solver holds the matrix of costs. Run it: ``python examples/points_transport.py``
"""

import matplotlib.pyplot as plt
import numpy as np
import ot
from _support import choose, device_name, host_timed, timed, to_numpy, xp
from sklearn.datasets import load_sample_image

from cupyflash import points

SIZE = choose(tiny=100, cpu=1500, gpu=50_000)
PEER = min(SIZE, 1500)
EPSILON = 0.01

# %%
# The plan
# --------

rng = np.random.default_rng(0)
images = [load_sample_image(name) / 255.0 for name in ("china.jpg", "flower.jpg")]
source, target = (rng.permutation(image.reshape(-1, 3))[:SIZE] for image in images)
x, y = xp.asarray(source), xp.asarray(target)
transport, seconds = timed(points.sinkhorn, x, y, epsilon=EPSILON)
assert transport.converged
print(
    f"{device_name()}: {SIZE:,} colours each, {transport.iterations} iterations, "
    f"{seconds:.2f} s, error of the marginals {transport.error:.0e}"
)

# %%
# Beside POT
# ----------
# On as many colours as its matrices fit, to the same error.

a, b = source[:PEER], target[:PEER]
weights = np.full(PEER, 1 / PEER)
found, ours = host_timed(points.sinkhorn, a, b, epsilon=EPSILON)
cost = ot.dist(a, b)
plan, theirs = host_timed(
    ot.bregman.sinkhorn_log, weights, weights, cost, EPSILON, stopThr=1e-8, warn=False
)
difference = np.abs(found.barycenters() - plan @ b * PEER).max()
print(f"{PEER:,} colours on NumPy: {ours:.2f} s, POT {theirs:.2f} s")
print(f"colours differ by {difference:.1e}")
assert difference < 1e-3

# %%
# Where colours go
# ----------------
# With a reach, colours without a partner near by stay as they are.

near = points.sinkhorn(x, y, epsilon=EPSILON, reach=0.2)
fig, axes = plt.subplots(1, 3, figsize=(9, 2.5), layout="constrained")
image = images[0][::8, ::8]
for axis, result, title in zip(
    axes, (None, transport, near), ("china", "balanced", "reach 0.2"), strict=True
):
    shown = image
    if result is not None:
        # The plan's means, also for pixels that took no part.
        side = result.plan.T._rows
        scores = side.scores(EPSILON)
        flat = xp.asarray(image.reshape(-1, 3))
        moved = points.mean(flat, y, y, scores, bandwidth=(EPSILON / 2) ** 0.5)
        shown = to_numpy(moved).reshape(image.shape)
    axis.imshow(np.clip(shown, 0, 1))
    axis.set_title(title)
    axis.set_axis_off()
plt.show()
