"""Points in the order of a k-d tree's leaves, so that tiles of them are small."""

import numpy as np


def kd_order(points: np.ndarray, leaf: int) -> np.ndarray:
    """An order in which every `leaf` points are a leaf of a k-d tree.

    Each node is halved across its longest side (J. L. Bentley, 1975), up to a multiple
    of `leaf`, so that only the last leaf has fewer points.
    """
    order = np.arange(len(points))
    nodes = [(0, len(points))]
    while nodes:
        start, stop = nodes.pop()
        size = stop - start
        if size <= leaf:
            continue
        part = order[start:stop]
        own = points[part]
        longest = np.argmax(own.max(axis=0) - own.min(axis=0))
        middle = -(-size // (2 * leaf)) * leaf
        order[start:stop] = part[np.argpartition(own[:, longest], middle)]
        nodes += (start, start + middle), (start + middle, stop)
    return order
