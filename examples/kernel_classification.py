"""
Kernel classification of digits
===============================

Each digit gets the class that has the most weight among all the other digits, where
weights fall with the distance between images as :math:`\\exp(-|x - x_j|^2 / (2 h^2))`.
That is attention over the training set, with classes as one-hot values, and the result
is a probability for each class. Several widths *h* are computed at once, as a batch of
scaled queries.

Data: ``sklearn.datasets.load_digits()``, 1797 images of 8 x 8. Compared with:
scikit-learn's nearest neighbours, at their default and with all neighbours.
Run it: ``python examples/kernel_classification.py``
"""

import matplotlib.pyplot as plt
import numpy as np
from _support import choose, device_name, host_timed, timed, to_numpy, xp
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

import cupyflash

NUM = choose(tiny=400, cpu=1797, gpu=1797)
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
# all digits as neighbours, weighted by the kernel. Its default of five neighbours is
# what you would normally use if you only want the class. The kernel gives
# probabilities, and a gradient if you want to learn the distance.

h, half = float(WIDTHS[best]), NUM // 2
ours, seconds = timed(
    cupyflash.attention,
    x[half:],
    x[:half],
    one_hot[:half],
    scale=1 / h**2,
    bias=-(x[:half] ** 2).sum(axis=1) / (2 * h**2),
)


def kernel(distance):
    """Weights of neighbours; the nearest has weight 1, so that none underflows."""
    square = distance**2
    return np.exp((square.min(axis=1, keepdims=True) - square) / (2 * h**2))


peer = KNeighborsClassifier(n_neighbors=half, weights=kernel, algorithm="brute")
peer.fit(images[:half], labels[:half])
expected, peer_seconds = host_timed(peer.predict_proba, images[half:])
error = abs(to_numpy(ours) - expected).max()
print(f"half by half: {seconds:.4f} s, scikit-learn {peer_seconds:.4f} s")
right = (to_numpy(ours).argmax(axis=1) == labels[half:]).mean()
usual = KNeighborsClassifier().fit(images[:half], labels[:half])
usual_right, usual_seconds = host_timed(usual.score, images[half:], labels[half:])
print(f"right: {right:.1%}; 5 neighbours {usual_right:.1%} in {usual_seconds:.4f} s")
print(f"largest difference of a probability: {error:.1e}")
assert error < 1e-4

plt.show()
