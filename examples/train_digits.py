"""
A classifier trained without a framework
========================================

A digit is classified by attention to the digits of the training set: its query is
compared with their keys, their labels are the values, and the mean over the heads is
the probability of each class. The two linear maps to queries and keys are learned. In
training, every digit attends to all the others (a mask hides itself), and
`attention_vjp` carries the gradient of the loss back to the maps.

The same training also runs with unfused attention, which keeps all scores in memory:
the loss and the accuracy are the same, the time and memory are not. In accuracy,
scikit-learn's five nearest neighbours are as good or better, in no time: for digits
this clean, use those. The page is about how to train without a framework.

Data: scikit-learn's ``load_digits()``, 1797 images of 8 x 8, the optical digits of
E. Alpaydin and C. Kaynak (UCI, licence CC BY 4.0). Run it: ``python
examples/train_digits.py``
"""

import time
import tracemalloc

import matplotlib.pyplot as plt
import numpy as np
from _support import choose, device_name, to_numpy, xp
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

import cupyflash

HEADS, DIM, CLASSES, TRAIN = 4, 32, 10, 1200
STEPS = choose(tiny=3, cpu=30, gpu=100)


def heads(x):
    """(samples, heads * dim) as (heads, samples, dim)."""
    return x.reshape(len(x), HEADS, -1).swapaxes(0, 1)


def rows(x):
    """The reverse of `heads`."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


# %%
# Attention and its gradient, fused and unfused
# ---------------------------------------------


class Fused:
    """One block of scores at a time."""

    @staticmethod
    def forward(q, k, v, mask=None):
        out, lse = cupyflash.attention(q, k, v, mask=mask, return_lse=True)
        return out, (q, k, v, out, lse, mask)

    @staticmethod
    def backward(dout, saved):
        *saved, mask = saved
        grads = cupyflash.attention_vjp(dout, *saved, mask=mask)
        return grads.dq, grads.dk


class Unfused:
    """All scores in memory, and all their gradients."""

    @staticmethod
    def forward(q, k, v, mask=None):
        s = q @ k.swapaxes(-1, -2) * q.dtype.type(DIM**-0.5)
        if mask is not None:
            s = xp.where(mask, s, -xp.inf)
        p = cupyflash.softmax(s, axis=-1)
        return p @ v, (q, k, v, p)

    @staticmethod
    def backward(dout, saved):
        q, k, v, p = saved
        ds = cupyflash.softmax_vjp(p, dout @ v.swapaxes(-1, -2), axis=-1)
        ds *= q.dtype.type(DIM**-0.5)
        return ds @ k, ds.swapaxes(-1, -2) @ q


# %%
# The model
# ---------


def loss_and_gradients(attention, weights, x, labels, mask):
    """Mean of -log(probability of the label), and its gradient by the two maps."""
    w_q, w_k = weights
    out, saved = attention.forward(heads(x @ w_q), heads(x @ w_k), labels, mask)
    probability = (out.mean(axis=0) * labels[0]).sum(axis=-1) + 1e-6
    loss = -xp.log(probability).mean()
    dout = -labels / (len(x) * HEADS * probability[:, None])
    dq, dk = attention.backward(xp.broadcast_to(dout, out.shape), saved)
    return loss, (x.T @ rows(dq), x.T @ rows(dk))


def accuracy(attention, weights, x, labels, x_test, digits):
    """Share of the test digits that are named right."""
    w_q, w_k = weights
    out, _ = attention.forward(heads(x_test @ w_q), heads(x @ w_k), labels)
    return float((out.mean(axis=0).argmax(axis=-1) == digits).mean())


def train(attention, data, steps, seed=0):
    """Losses, accuracy and seconds of a training by Adam."""
    x, labels, mask, x_test, digits = data
    rng = np.random.default_rng(seed)
    scale = 0.5 * x.shape[1] ** -0.5
    w = rng.standard_normal((x.shape[1], HEADS * DIM)) * scale
    weights = [xp.asarray(w.astype(np.float32)) for _ in range(2)]
    means = [xp.zeros_like(w) for w in weights]
    squares = [xp.zeros_like(w) for w in weights]
    losses = []
    start = time.perf_counter()
    for step in range(1, steps + 1):
        loss, grads = loss_and_gradients(attention, weights, x, labels, mask)
        for w, g, m, s in zip(weights, grads, means, squares, strict=True):
            m += 0.1 * (g - m)
            s += 0.01 * (g * g - s)
            g_hat, s_hat = m / (1 - 0.9**step), s / (1 - 0.99**step)
            w -= 0.02 * g_hat / (xp.sqrt(s_hat) + 1e-8)
        losses.append(loss)
    losses = [float(loss) for loss in losses]  # on a GPU this waits for the last step
    seconds = time.perf_counter() - start
    return losses, accuracy(attention, weights, x, labels, x_test, digits), seconds


# %%
# Fused and unfused
# -----------------


def load():
    """Digits as numbers of mean 0 and size 1, and the labels as values of all heads."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.data))
    x, y = digits.data[order].astype(np.float32), digits.target[order]
    x = (x - x[:TRAIN].mean()) / x[:TRAIN].std()
    one_hot = np.eye(CLASSES, dtype=np.float32)[y[:TRAIN]]
    labels = np.broadcast_to(one_hot, (HEADS, *one_hot.shape))
    mask = ~np.eye(TRAIN, dtype=bool)
    arrays = x[:TRAIN], labels, mask, x[TRAIN:], y[TRAIN:]
    return tuple(xp.ascontiguousarray(xp.asarray(a)) for a in arrays)


def peak_memory(attention, data):
    """Peak memory of one step in bytes, without the data."""
    if xp is np:
        tracemalloc.start()
        train(attention, data, 1)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak
    pool = xp.cuda.MemoryPool()
    with xp.cuda.using_allocator(pool.malloc):
        train(attention, data, 1)
        return pool.total_bytes()


data = load()
print(f"{device_name()}: {TRAIN} digits to learn from, {len(data[4])} to test")
print(f"{'attention':10}{'loss':>8}{'accuracy':>10}{'seconds':>9}{'peak MB':>9}")
found = {}
for attention in (Fused, Unfused):
    megabytes = peak_memory(attention, data) / 1e6
    losses, share, seconds = found[attention] = train(attention, data, STEPS)
    print(
        f"{attention.__name__.lower():10}{losses[-1]:8.4f}{share:10.4f}{seconds:9.2f}"
        f"{megabytes:9.1f}"
    )

(losses, share, _), (other_losses, other_share, _) = found.values()
assert abs(losses[-1] - other_losses[-1]) < 0.02 * other_losses[-1]
assert share >= other_share - 0.01

train_x, _, _, test_x, test_y = (to_numpy(a) for a in data)
train_y = to_numpy(data[1])[0].argmax(axis=1)
peer = KNeighborsClassifier().fit(train_x, train_y)
print(f"scikit-learn, 5 nearest neighbours: {peer.score(test_x, test_y):.4f}")

plt.figure(figsize=(5, 3.5), layout="constrained")
for attention, (losses, *_) in found.items():
    plt.plot(losses, label=attention.__name__.lower())
plt.xlabel("step")
plt.ylabel("loss")
plt.legend()
plt.show()
