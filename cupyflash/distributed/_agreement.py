"""That all ranks make one call: each tells the others what it was given."""

import json
from collections.abc import Callable
from typing import Any

from cupyflash.distributed._comm import Comm

_MOST_REMEMBERED = 256

# What must be the same on all ranks, by name, the function first; and what each has of
# its own. Both become JSON.
Description = tuple[dict[str, Any], Any]


def agree(
    comm: Comm, describe: Callable[[], Description], make: Callable[[list[Any]], Any]
) -> Any:
    """What `make` makes of what each rank has of its own; remembered by all of it.

    `describe` checks the arguments of this rank. Where one rank refuses its arguments,
    or has others, every rank raises, and all can go on: so they compare every call, as
    none can know from its own part alone whether the others have seen this one before.
    """
    refused = None
    try:
        alike, own = describe()
        record = {"alike": alike, "own": own}
    except Exception as error:
        refused, record = error, {"refused": f"{type(error).__name__}: {error}"}
    message = json.dumps(record, default=_plain).encode()
    messages = tuple(comm.all_gather(message))
    if refused is not None:
        raise refused
    if messages not in comm.made:
        made = make(_compared([json.loads(found) for found in messages]))
        if len(comm.made) >= _MOST_REMEMBERED:
            comm.made.clear()
        comm.made[messages] = made
    return comm.made[messages]


def _compared(records):
    """What each rank has of its own, if the rest is alike."""
    for rank, record in enumerate(records):
        if "refused" in record:
            raise ValueError(f"rank {rank} rejected its arguments: {record['refused']}")
    first = records[0]["alike"]
    for rank, record in enumerate(records):
        for name, its in record["alike"].items():
            if its != first.get(name):
                raise ValueError(
                    "every rank must make the same call, but "
                    f"{name} is {_said(its)} on rank {rank} and "
                    f"{_said(first.get(name))} on rank 0"
                )
    return [record["own"] for record in records]


def _plain(x):
    """A number of NumPy, or of another library, as JSON knows it."""
    return x.item() if hasattr(x, "item") else float(x)


def _said(x):
    return "absent" if x is None else str(x)
