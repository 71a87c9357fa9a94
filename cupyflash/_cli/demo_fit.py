"""A Bayesian fit against simulations: every pixel attends to every simulated signal.

In the brain, water held between layers of myelin loses its MRI signal faster than the
rest, so the decay of one pixel over the echoes tells how much myelin there is (myelin
water imaging, MacKay et al. 1994):

    signal(t) = f exp(-t / T_myelin) + (1 - f) exp(-t / T_other)

Two exponentials are hard to separate, and a fit should say how sure it is. Draw
parameters theta_j from a prior, simulate their signals s_j, and weigh each by how well
it explains the measured signal y under Gaussian noise:

    E[theta | y] = sum_j w_j theta_j / sum_j w_j,    w_j = exp(-|y - s_j|^2 / 2 sigma^2)

With both signals divided by sigma, -|y - s|^2 / 2 = y . s - |s|^2 / 2 - |y|^2 / 2. The
last term is the same for all j, so the softmax over j does not see it. What remains is
attention: measured signals are queries, simulated ones are keys with a bias, and
parameters are values. Squared parameters as further values give the variance, and the
log of the denominator gives the evidence.
"""

import numpy as np

from cupyflash._attention.api import attention
from cupyflash._cli.bench_cases import library_softmax

PARAMETERS = ("myelin fraction", "T2 of myelin, ms", "T2 of other water, ms")

# The prior: each parameter uniform between these.
LOW, HIGH = np.array([0.0, 10.0, 50.0]), np.array([0.3, 40.0, 120.0])

ECHO_TIMES = 10.0 * np.arange(1, 33)  # ms
NOISE = 0.01  # the signal starts at 1

# Pixels per block for the methods that store their scores.
_BLOCK = 256


def signal(times, fraction, myelin, other):
    """The decay of two kinds of water."""
    return fraction * np.exp(-times / myelin) + (1 - fraction) * np.exp(-times / other)


def simulate(theta):
    """The signals, without noise, of parameters given as rows."""
    return signal(ECHO_TIMES, *(column[:, None] for column in theta.T))


def draw_from_prior(rng, number):
    """Parameters of `number` simulations, one per row."""
    return rng.uniform(LOW, HIGH, (number, len(LOW)))


def phantom(rng, side):
    """Maps of the parameters, (side**2, 3), that fill the box of the prior evenly.

    Each map is smooth noise whose values are replaced by their ranks among the pixels
    that have similar values in the earlier maps. Ranked over all pixels instead, blobs
    of two maps would overlap more than independent parameters do, and the true
    parameters would not be distributed like the prior.
    """
    frequencies = np.fft.fftfreq(side)[:, None] ** 2 + np.fft.rfftfreq(side) ** 2
    width = side / 12
    blur = np.exp(-2 * (np.pi * width) ** 2 * frequencies)
    num_pixels = side * side
    num_levels = round(num_pixels ** (1 / len(LOW)))
    alike = np.zeros(num_pixels, int)  # equal number: similar earlier maps
    maps = np.empty((num_pixels, len(LOW)))
    for i, (low, high) in enumerate(zip(LOW, HIGH, strict=True)):
        white = np.fft.rfft2(rng.standard_normal((side, side)))
        smooth = np.fft.irfft2(white * blur, s=(side, side)).ravel()
        counts = np.bincount(alike)
        order = np.lexsort((smooth, alike))
        ranks = np.empty(num_pixels)
        ranks[order] = np.arange(num_pixels) - np.repeat(
            np.cumsum(counts) - counts, counts
        )
        levels = (ranks + 0.5) / counts[alike]
        maps[:, i] = low + (high - low) * levels
        alike = num_levels * alike + (num_levels * levels).astype(int)
    return maps


class Simulations:
    """Samples from the prior and their signals, prepared for comparison with pixels."""

    def __init__(self, theta, xp=np):
        self.xp = xp
        signals = simulate(theta)
        # Centred and in units of the noise, so that float32 is accurate enough.
        self.centre = signals.mean(axis=0)
        self.keys = self._scaled(signals)
        self.bias = -(self.keys**2).sum(axis=1) / 2
        self.theta = theta
        # Scaled to [-1, 1], since the variance is a difference of squares.
        self.units = xp.asarray(_to_units(theta), xp.float32)

    def _scaled(self, signals):
        return self.xp.asarray((signals - self.centre) / NOISE, self.xp.float32)

    def posterior(self, measured):
        """Posterior mean and standard deviation, and log evidence, of each pixel."""
        queries = self._scaled(measured)
        values = self.xp.concatenate([self.units, self.units**2], axis=1)
        out, lse = attention(
            queries, self.keys, values, scale=1, bias=self.bias, return_lse=True
        )
        return self._moments(out, lse - (queries**2).sum(axis=1) / 2)

    def posterior_of_blocks(self, measured):
        """The same, storing all scores of a block of pixels."""
        queries = self._scaled(measured)
        values = self.xp.concatenate([self.units, self.units**2], axis=1)
        softmax = library_softmax(self.xp)
        out = [
            softmax(block @ self.keys.T + self.bias, axis=1) @ values
            for block in _blocks(queries)
        ]
        return self._moments(self.xp.concatenate(out), None)[:2]

    def best_match(self, measured):
        """The most similar simulation, by scikit-learn on the CPU."""
        from sklearn.neighbors import NearestNeighbors

        keys, queries = to_host(self.keys), to_host(self._scaled(measured))
        search = NearestNeighbors(n_neighbors=1).fit(keys)
        return self.theta[search.kneighbors(queries, return_distance=False)[:, 0]], None

    def best_match_of_blocks(self, measured):
        """The same by matrix products and argmax, on the CPU or the GPU."""
        found = [
            (block @ self.keys.T + self.bias).argmax(axis=1)
            for block in _blocks(self._scaled(measured))
        ]
        return self.theta[to_host(self.xp.concatenate(found))], None

    def _moments(self, out, log_sum):
        """Means and standard deviations in the units of the parameters, on the host."""
        mean, square = np.split(to_host(out).astype(np.float64), 2, axis=1)
        deviation = np.sqrt(np.maximum(square - mean**2, 0)) * (HIGH - LOW) / 2
        evidence = None
        if log_sum is not None:
            constant = len(ECHO_TIMES) * np.log(NOISE * np.sqrt(2 * np.pi))
            evidence = to_host(log_sum) - np.log(len(self.theta)) - constant
        return _from_units(mean), deviation, evidence


def least_squares(measured):
    """Fit each pixel with scipy.optimize.curve_fit, inside the box of the prior."""
    from scipy.optimize import curve_fit

    start = (LOW + HIGH) / 2
    fits = [
        curve_fit(signal, ECHO_TIMES, y, start, bounds=(LOW, HIGH))[0] for y in measured
    ]
    return np.array(fits), None


def _blocks(queries):
    return (queries[i : i + _BLOCK] for i in range(0, len(queries), _BLOCK))


def _to_units(theta):
    return (2 * theta - LOW - HIGH) / (HIGH - LOW)


def _from_units(units):
    return (units * (HIGH - LOW) + LOW + HIGH) / 2


def to_host(x):
    """An array as NumPy's, in its own dtype."""
    return x if isinstance(x, np.ndarray) else x.get()
