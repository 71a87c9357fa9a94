"""
Non-local means over a whole photograph
=======================================

Non-local means [1]_ replaces a pixel by a weighted mean of others. The weight of pixel
*j* for pixel *i* falls with the distance of the patches round them,

.. math:: w_{ij} = \\exp(-|p_i - p_j|^2 / h^2).

Programs usually search a window round each pixel, because the matrix of all pairs does
not fit into memory. Here every pixel sees every other: expanding the square gives

.. math:: -|p_i - p_j|^2 / h^2 = (2 / h^2)\\, p_i \\cdot p_j - |p_j|^2 / h^2
          - |p_i|^2 / h^2,

and as the last term is the same for all *j*, the softmax over *j* does not see it. What
is left is attention: patches are queries and keys, colours are values, the scale is
:math:`2 / h^2`, and each key has a bias. The matrix is never made.

Data: ``skimage.data.astronaut()``, with noise added. Peer: scikit-image.
Run it: ``python examples/nonlocal_means.py``

.. [1] Buades, Coll and Morel, "A non-local algorithm for image denoising",
   CVPR 2005.
"""

import math

import matplotlib.pyplot as plt
import numpy as np
from _support import choose, device_name, host_timed, timed, to_numpy, xp
from skimage import data, metrics, restoration, transform

import cupyflash

SIDE = choose(tiny=32, cpu=128, gpu=512)
PATCH = 5
NOISE = 0.1  # standard deviation; colours span [0, 1]
STRENGTH = 0.7  # h = STRENGTH * NOISE * sqrt(numbers in a patch)

# %%
# Patches
# -------
# Each pixel becomes a row of 5 x 5 colours. They are centred: distances stay as they
# are, and squares and products stay small, which float32 likes.


def patches(image, width=PATCH):
    """The patch round each pixel, as rows."""
    pad = width // 2
    padded = np.pad(image, ((pad, pad), (pad, pad), (0, 0)), mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (width, width), (0, 1))
    rows = windows.reshape(image.shape[0] * image.shape[1], -1)
    return (rows - 0.5).astype(np.float32)


# %%
# All pixels at once
# ------------------
# A pixel is at distance 0 from itself, but at about :math:`2 \sigma^2` a number from an
# equal patch under other noise; with its raw weight it would keep its own noise.
# The lse tells that weight: :math:`\exp(s_{ii} - \mathrm{lse}_i)`. What is above the
# weight of such another patch is taken out again.


def denoise(keys, colours, h):
    """The weighted mean of all colours, for each pixel."""
    bias = -(keys**2).sum(axis=1) / h**2
    mean, lse = cupyflash.attention(
        keys, keys, colours, scale=2 / h**2, bias=bias, return_lse=True
    )
    own = xp.exp(-bias - lse)  # as s_ii = 2 |p_i|^2 / h^2 - |p_i|^2 / h^2
    other = math.exp(-2 * NOISE**2 * keys.shape[1] / h**2)
    excess = (xp.minimum(own, 1) * (1 - other))[:, None]
    return (mean - excess * colours) / (1 - excess)


clean = data.astronaut() / 255.0
clean = transform.resize(clean, (SIDE, SIDE), anti_aliasing=True)
rng = np.random.default_rng(0)
noisy = clean + NOISE * rng.standard_normal(clean.shape)

keys = xp.asarray(patches(noisy))
colours = xp.asarray(noisy.reshape(-1, 3).astype(np.float32))
h = STRENGTH * NOISE * keys.shape[1] ** 0.5
result, seconds = timed(denoise, keys, colours, h)
ours = to_numpy(result).reshape(clean.shape)

peer, peer_seconds = host_timed(
    restoration.denoise_nl_means,
    noisy,
    patch_size=PATCH,
    patch_distance=11,
    h=0.6 * NOISE,
    sigma=NOISE,
    fast_mode=True,
    channel_axis=-1,
)


def quality(image):
    """PSNR in dB."""
    return metrics.peak_signal_noise_ratio(clean, np.clip(image, 0, 1), data_range=1)


print(f"{device_name()}: {SIDE} x {SIDE} pixels, {len(keys) ** 2:.1e} pairs")
print(f"noisy                            {quality(noisy):6.2f} dB")
print(f"cupyflash, all pixels            {quality(ours):6.2f} dB  {seconds:8.3f} s")
print(
    f"scikit-image, 23 x 23 window     {quality(peer):6.2f} dB  {peer_seconds:8.3f} s"
)

figure, axes = plt.subplots(1, 3, figsize=(10, 3.7), layout="constrained")
for axis, image, title in zip(
    axes, (noisy, ours, peer), ("noisy", "mean over all pixels", "window"), strict=True
):
    axis.imshow(np.clip(image, 0, 1))
    axis.set_title(f"{title}: {quality(image):.1f} dB")
    axis.set_axis_off()

# %%
# Is it exact?
# ------------
# Eight pixels by the formula as written, in float64 and with every pair.

every_key = to_numpy(keys).astype(np.float64)
error = 0.0
for i in rng.choice(len(keys), 8, replace=False):
    weights = np.exp(-((every_key[i] - every_key) ** 2).sum(axis=1) / h**2)
    weights[i] = np.exp(-2 * NOISE**2 * keys.shape[1] / h**2)
    exact = weights @ noisy.reshape(-1, 3) / weights.sum()
    error = max(error, abs(ours.reshape(-1, 3)[i] - exact).max())
print(f"largest error of 8 pixels, against float64: {error:.1e}")
assert error < 1e-3

# %%
# The same numbers as scikit-image
# --------------------------------
# In its slow mode, with a window as large as the image, scikit-image computes the same
# mean, with patches weighted by a Gaussian. It drops pairs whose exponent is below -5
# (none for this h) and uses a fast approximation of the exponential, good to a few
# parts in a hundred; the difference of the means is far smaller.

CROP, WIDE = choose(tiny=24, cpu=40, gpu=64), 0.4
crop = transform.resize(noisy, (CROP, CROP))
offsets = np.arange(PATCH) - PATCH // 2
gauss = np.exp(-(offsets[:, None] ** 2 + offsets**2) / (2 * ((PATCH - 1) / 4) ** 2))
root = np.tile(np.sqrt(gauss / gauss.sum()).ravel(), 3).astype(np.float32)
crop_keys = xp.asarray(patches(crop) * root)
mean, seconds = timed(
    cupyflash.attention,
    crop_keys,
    crop_keys,
    xp.asarray(crop.reshape(-1, 3).astype(np.float32)),
    scale=2 / (3 * WIDE**2),
    bias=-(crop_keys**2).sum(axis=1) / (3 * WIDE**2),
)
peer, peer_seconds = host_timed(
    restoration.denoise_nl_means,
    crop,
    patch_size=PATCH,
    patch_distance=CROP,
    h=WIDE,
    fast_mode=False,
    channel_axis=-1,
)
difference = abs(to_numpy(mean).reshape(crop.shape) - peer).max()
change = abs(crop - peer).max()
print(f"{CROP} x {CROP} pixels: {seconds:.3f} s, scikit-image {peer_seconds:.3f} s")
print(f"largest difference: {difference:.1e}, of changes up to {change:.2f}")
assert difference < 0.005

plt.show()
