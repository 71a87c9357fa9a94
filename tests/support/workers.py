"""What workers of pytest-xdist share: the cards, and each kernel that one compiled."""

import os
import tempfile
import zlib
from pathlib import Path

# Memory of a card that a worker may need: its context, its pool, the largest arrays.
BYTES_A_WORKER = 4 << 30


def number_of(cores, bytes_of_cards):
    """How many workers keep the cores busy, of which some wait for one another."""
    fit = sum(size // BYTES_A_WORKER for size in bytes_of_cards)
    return max(1, min(cores + cores // 2, fit))


def all_cards():
    """CUDA_VISIBLE_DEVICES of a process that sees all cards."""
    import cupy

    return ",".join(map(str, range(cupy.cuda.runtime.getDeviceCount())))


def cards_of(worker, cards):
    """CUDA_VISIBLE_DEVICES of a worker, such as gw5: all cards, in turn the first."""
    names = cards.split(",")
    turn = int(worker.removeprefix("gw")) % len(names)
    return ",".join(names[turn:] + names[:turn])


def take_turns():
    """See the cards in the order of this worker; before CUDA is started."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    cards = os.environ.get("CUDA_VISIBLE_DEVICES")
    if worker and cards:
        os.environ["CUDA_VISIBLE_DEVICES"] = cards_of(worker, cards)


def compile_once(run):
    """Let one worker of a test run compile a kernel, while others wait for it.

    They find it in CuPy's cache folder then. And nobody asks which compiler there is
    for each new set of options, as CuPy does by compiling an empty file.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return
    from cupy.cuda import compiler

    compile_here, preprocess = compiler._compile_with_cache_cuda, compiler._preprocess
    folder = Path(tempfile.gettempdir()) / f"cupyflash-{run}"
    folder.mkdir(exist_ok=True)
    versions = {}

    def compile_alone(source, options, *args, **kwargs):
        # A file for each: locks of parts of one belong to a process, whose threads the
        # system takes for one waiter, and it sees deadlocks where there are none.
        with (folder / name_of(source, options)).open("ab") as file:  # closing lets go
            fcntl.flock(file, fcntl.LOCK_EX)
            return compile_here(source, options, *args, **kwargs)

    def version_of(source, options, arch, backend):
        if source:
            return preprocess(source, options, arch, backend)
        if (arch, backend) not in versions:
            versions[arch, backend] = preprocess(source, options, arch, backend)
        return versions[arch, backend]

    compiler._compile_with_cache_cuda = compile_alone
    compiler._preprocess = version_of


def name_of(source, options):
    """The name of the file of a kernel's lock."""
    return f"{zlib.crc32(repr((source, options)).encode()):08x}.lock"
