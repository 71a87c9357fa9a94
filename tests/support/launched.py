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

        def note(launch):
            if launch.__dict__.get("_turn") != watch._turn:
                launch._turn = watch._turn
                watch.names.add(planned.digest_of(launch.variant))

        def noting(method):
            def noted(self, *args):
                note(self)
                return method(self, *args)

            return noted

        def noting_later(method):
            def noted(self):
                found = method(self)
                if found is None:
                    return None
                start, *first = found

                def noted_start(*args):
                    note(self)
                    return start(*args)

                return noted_start, *first

            return noted

        for name in ("__call__", "enqueue"):
            setattr(launch, name, noting(getattr(launch, name)))
        launch.starter = noting_later(launch.starter)
        return launch
