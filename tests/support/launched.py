"""Which variants of kernels are launched, test by test."""

import planned


class Watch:
    """Notes each variant once between two calls of begin()."""

    def __init__(self):
        self.names = set()
        self._turn = 0

    def begin(self):
        """Forget what was launched."""
        self.names = set()
        self._turn += 1

    def over(self, launch):
        """A class of launches like `launch`, with its calls noted here."""
        watch = self

        def noting(method):
            def noted(self, *args):
                if self.__dict__.get("_turn") != watch._turn:
                    self._turn = watch._turn
                    watch.names.add(planned.digest_of(self.variant))
                return method(self, *args)

            return noted

        for name in ("__call__", "enqueue"):
            setattr(launch, name, noting(getattr(launch, name)))
        return launch
