"""
Kernel classification of digits
===============================

Each digit gets the class that has the most weight among all the other digits, where
weights fall with the distance between images as :math:`\\exp(-|x - x_j|^2 / (2 h^2))`.
That is attention over the training set, with classes as one-hot values, and the result
is a probability for each class. Several widths *h* are computed at once, as a batch of
scaled queries.

Data: scikit-learn's ``load_digits()``, 1797 images of 8 x 8, the optical digits of
E. Alpaydin and C. Kaynak (UCI, licence CC BY 4.0). Compared with: scikit-learn's
nearest neighbours, at their default and with all neighbours.
Run it: ``python examples/kernel_classification.py``
"""

import matplotlib.pyplot as plt
import numpy as np
from _support import choose, device_name, host_timed, timed, to_numpy, xp
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

import cupyflash

NUM = choose(tiny=400, cpu=1797, gpu=1797)
SIZES = choose(tiny=[50, 200], cpu=[200, 898, 5000], gpu=[200, 898, 5000])
WIDTHS = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 9.0, 14.0])

digits = load_digits()
images = digits.data[:NUM]
images = images - images.mean(axis=0)  # same distances, smaller products
labels = digits.target[:NUM]
x = xp.asarray(images, dtype=xp.float32)
one_hot = xp.eye(10, dtype=xp.float32)[xp.asarray(labels)]

# %%
# Every width in one call
# -----------------------
# A call has a single scale, so the widths go into queries and biases, as a batch axis
# in front. Keys and values have no such axis and broadcast. The mask keeps each digit
# from voting for itself.


def leave_one_out(widths):
    """Class probabilities (width, digit, class), each digit judged by the others."""
    precision = xp.asarray(1 / widths**2, dtype=xp.float32)[:, None, None]
    squares = (x**2).sum(axis=1)
    return cupyflash.attention(
        (x * precision)[:, None],  # (width, head, digit, pixel)
        x[None, None],
        one_hot[None, None],
        scale=1,
        bias=(-squares / 2 * precision)[:, None],  # (width, head, 1, digit)
        mask=~xp.eye(NUM, dtype=bool),
    )[:, 0]


probabilities, seconds = timed(leave_one_out, WIDTHS)
guesses = to_numpy(probabilities.argmax(axis=2))
accuracy = (guesses == labels).mean(axis=1)
chance = to_numpy(probabilities)[:, np.arange(NUM), labels]  # of the true class
surprise = -np.log(np.maximum(chance, 1e-6)).mean(axis=1)
best = int(surprise.argmin())  # widths that give certainties pay for false ones
print(f"{device_name()}: {len(WIDTHS)} widths, {len(WIDTHS) * NUM**2:.1e} pairs")
print(f"cupyflash: {seconds:.3f} s, {accuracy[best]:.2%} at h = {WIDTHS[best]:g}")

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
left.semilogx(WIDTHS, 100 * (1 - accuracy), "o-", label="wrong, %")
left.semilogx(WIDTHS, surprise, "s-", label="surprise, nats")
left.set(xlabel="h", ylim=0, title="leaving one out")
left.legend()
wrong = np.flatnonzero(guesses[best] != labels)[:8]
tiles = np.full((2, 9, 4, 9), np.nan)
for tile, i in zip(np.ndindex(2, 4), wrong, strict=False):
    tiles[tile[0], :8, tile[1], :8] = digits.images[i]
    right.text(
        9 * tile[1], 9 * tile[0] + 8.6, f"{labels[i]} as {guesses[best][i]}", color="C3"
    )
right.imshow(tiles.reshape(18, 36), cmap="gray_r")
right.set_title("some that are wrong")
right.set_axis_off()

# %%
# The same numbers as scikit-learn
# --------------------------------
# One half of the digits judges the other half. scikit-learn gives the same numbers with
# all digits as neighbours, weighted by the kernel, and takes some 20 to 60 times as
# long. Its default of five neighbours is what you would normally use if you only want
# the class. On two cores it takes a little longer than the kernel at all three sizes,
# and gives only coarse probabilities, and no gradient to learn the distance by.
#
# For more digits than there are, digits of the same half are drawn again, with noise.

h = float(WIDTHS[best])


def kernel(distance):
    """Weights of neighbours; the nearest has weight 1, so that none underflows."""
    square = distance**2
    return np.exp((square.min(axis=1, keepdims=True) - square) / (2 * h**2))


rng = np.random.default_rng(0)
halves = np.array_split(rng.permutation(NUM), 2)
for n in SIZES:
    chosen = np.concatenate([np.resize(half, n) for half in halves])
    some, classes = images[chosen], labels[chosen]
    if n > NUM // 2:
        some += rng.normal(size=some.shape)
    train, test = xp.asarray(some[:n], xp.float32), xp.asarray(some[n:], xp.float32)
    ours, seconds = timed(
        cupyflash.attention,
        test,
        train,
        one_hot[xp.asarray(chosen[:n])],
        scale=1 / h**2,
        bias=-(train**2).sum(axis=1) / (2 * h**2),
    )
    ours = to_numpy(ours)
    peer = KNeighborsClassifier(n_neighbors=n, weights=kernel, algorithm="brute")
    peer.fit(some[:n], classes[:n])
    expected, peer_seconds = host_timed(peer.predict_proba, some[n:])
    usual = KNeighborsClassifier().fit(some[:n], classes[:n])
    usual_right, usual_seconds = host_timed(usual.score, some[n:], classes[n:])
    right = (ours.argmax(axis=1) == classes[n:]).mean()
    error = abs(ours[:, peer.classes_] - expected).max()
    print(f"{n:,} digits by {n:,}: {seconds:.4f} s, {right:.1%} right")
    print(
        f"  scikit-learn, all neighbours: {peer_seconds:.4f} s, differs by {error:.0e}"
    )
    print(f"  5 neighbours: {usual_seconds:.4f} s, {usual_right:.1%} right")
    assert error < 1e-4

plt.show()
