"""explain: which kernel would run, and why."""


def explain(function, *args, **kwargs):
    """TODO."""
    raise NotImplementedError
