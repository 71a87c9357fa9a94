"""Plans of earlier calls."""

from typing import Any

# Plans are small; but a stream of ever new shapes must not keep them forever.
MAX_PLANS = 4096


class PlanCache:
    """Plans by what they depend on: shapes, strides, dtypes and options."""

    def __init__(self):
        self._plans: dict[Any, Any] = {}
        self.get = self._plans.get  # the dictionary's own: each call begins with it

    def put(self, key, plan):
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        self._plans[key] = plan
