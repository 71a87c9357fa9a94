"""connect(): what launchers tell, and how ranks find each other."""

import concurrent.futures
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import ranks as support

from cupyflash import distributed
from cupyflash.distributed import _environment, _sockets

ROOT = Path(__file__).parents[2]
OF_LAUNCHERS = {
    "torchrun": {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0"},
    "mpirun": {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    },
    "mpich": {"PMI_RANK": "1", "PMI_SIZE": "4"},
    "srun": {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"},
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    names = [n for group in _environment._LAUNCHERS for n in group]
    names += ["MASTER_ADDR", "MASTER_PORT", "CUPYFLASH_PORT"]
    for name in [*names, "TORCHELASTIC_USE_AGENT_STORE"]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def asked(monkeypatch):
    """The arguments with which a SocketComm would be made."""
    found = []
    monkeypatch.setattr(
        _sockets, "SocketComm", lambda *args, **more: found.append((*args, more))
    )
    monkeypatch.setattr(_environment, "_mpi_world", lambda size: None)
    return found


def test_alone():
    with distributed.connect() as comm:
        assert (comm.rank, comm.size, comm.local_rank) == (0, 1, 0)
        assert comm.all_gather(b"x") == [b"x"]


@pytest.mark.parametrize("launcher", OF_LAUNCHERS)
def test_launchers(launcher, asked, monkeypatch):
    for name, value in OF_LAUNCHERS[launcher].items():
        monkeypatch.setenv(name, value)
    distributed.connect(timeout=5)
    ((rank, size, host, port, more),) = asked
    assert (rank, size, host, port) == (1, 4, "127.0.0.1", 29400)
    local_rank = 0 if launcher == "torchrun" else 1
    assert more == {"timeout": 5.0, "local_rank": local_rank}


def test_where_rank_0_listens(asked, monkeypatch):
    for name, value in OF_LAUNCHERS["torchrun"].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "node7")
    monkeypatch.setenv("MASTER_PORT", "1234")
    distributed.connect()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    distributed.connect()
    monkeypatch.setenv("CUPYFLASH_PORT", "4321")
    distributed.connect()
    assert [(host, port) for _, _, host, port, _ in asked] == [
        ("node7", 1234), ("node7", 1235), ("node7", 4321),
    ]  # fmt: skip


def test_errors_in_words(monkeypatch):
    with pytest.raises(ValueError, match="seconds above 0, got 0"):
        distributed.connect(timeout=0)
    with pytest.raises(TypeError, match="an mpi4py communicator, got str"):
        distributed.connect("world")
    monkeypatch.setenv("RANK", "two")
    with pytest.raises(ValueError, match="RANK must be an integer, got 'two'"):
        distributed.connect()
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE must be an integer, got None"):
        distributed.connect()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="RANK=2 is not a rank of WORLD_SIZE=2"):
        distributed.connect()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("MASTER_PORT", "65536", "MASTER_PORT must be from 1 to 65535, got 65536"),
        ("CUPYFLASH_PORT", "-1", "CUPYFLASH_PORT must be from 1 to 65535, got -1"),
        ("LOCAL_RANK", "-2", "LOCAL_RANK=-2 is not a rank of WORLD_SIZE=4"),
    ],
)
def test_numbers_out_of_range(monkeypatch, name, value, words):
    for variable, its in {**OF_LAUNCHERS["torchrun"], name: value}.items():
        monkeypatch.setenv(variable, its)
    with pytest.raises(ValueError, match=words):
        distributed.connect()


def test_an_address_of_no_machine(monkeypatch):
    for variable, its in OF_LAUNCHERS["torchrun"].items():
        monkeypatch.setenv(variable, its)
    monkeypatch.setenv("MASTER_ADDR", "")
    with pytest.raises(ConnectionError, match=r"MASTER_ADDR is not the address .* ''"):
        distributed.connect(timeout=1)


def test_several_machines_need_mpi_or_an_address(monkeypatch, asked):
    monkeypatch.setenv("SLURM_PROCID", "5")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    with pytest.raises(ImportError, match="MASTER_ADDR"):
        distributed.connect()
    monkeypatch.setenv("MASTER_ADDR", "node0")
    distributed.connect()
    assert asked


def test_ranks_that_do_not_come():
    with pytest.raises(TimeoutError, match="2 of 3 ranks did not connect in time"):
        _sockets.SocketComm(0, 3, "127.0.0.1", support.free_port(), timeout=0.3)
    with pytest.raises(TimeoutError, match="rank 1 could not reach"):
        _sockets.SocketComm(1, 3, "127.0.0.1", support.free_port(), timeout=0.3)


def test_a_third_rank_that_does_not_come():
    """Rank 1 has called rank 0, which waits for rank 2."""
    port, found = support.free_port(), []

    def first():
        with pytest.raises(TimeoutError):
            _sockets.SocketComm(0, 3, "127.0.0.1", port, timeout=3)
        found.append("in time")

    thread = threading.Thread(target=first)
    thread.start()
    with pytest.raises(TimeoutError, match="not all 3 ranks reached rank 0"):
        _sockets.SocketComm(1, 3, "127.0.0.1", port, timeout=1)
    thread.join(20)
    assert found == ["in time"]


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConnectionError, match="set CUPYFLASH_PORT"):
            _sockets.SocketComm(0, 2, "127.0.0.1", port, timeout=1)


def test_strangers_are_hung_up_on():
    port, found = support.free_port(), []

    def rank(number):
        with _sockets.SocketComm(number, 2, "127.0.0.1", port, timeout=20) as comm:
            found.append(comm.all_gather(bytes([number])))

    first = threading.Thread(target=rank, args=(0,))
    first.start()
    while True:
        try:
            stranger = socket.create_connection(("127.0.0.1", port))
            break
        except OSError:
            continue
    with stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        rank(1)
    first.join(20)
    assert found == [[b"\0", b"\1"]] * 2


def parts(comm, causal):
    x = np.random.default_rng(0).normal(size=(3, 11, 2))
    back = distributed.unshard(
        distributed.shard(x, comm, causal=causal), comm, causal=causal
    )
    lists = distributed.shard([1, 2, 3, 4, 5], comm, 0)
    return np.array_equal(back, x), lists.tolist()


@pytest.mark.parametrize("causal", [False, True])
def test_shard_and_unshard(ranks, causal):
    found = ranks.all(3, parts, causal)
    assert [same for same, _ in found] == [True] * 3
    assert [part for _, part in found] == [[1], [2, 3], [4, 5]]


def unequal(comm):
    try:
        distributed.unshard(np.ones((comm.rank + 1, 3)), comm, axis=1)
    except ValueError as error:
        return str(error)
    return None


def test_parts_that_do_not_belong_together(ranks):
    for text in ranks.all(2, unequal):
        assert "x is float64 (2, its part) on rank 1 and float64 (1, its part)" in text


def test_what_is_no_comm_and_no_numbers():
    with pytest.raises(TypeError, match="comm must come from"):
        distributed.shard(np.ones(4), None, 0)
    with pytest.raises(TypeError, match="comm must come from"):
        distributed.unshard(np.ones(4), "world", 0)
    with distributed.connect() as comm:
        with pytest.raises(TypeError, match="x must hold numbers, got object"):
            distributed.unshard(np.array([None]), comm, 0)
        with pytest.raises(np.exceptions.AxisError):
            distributed.unshard(np.ones(4), comm, 1)


def send_for_ever(comm):
    while True:
        comm.exchange([np.zeros(3)], 1, [], None)()


def test_the_last_words_of_a_rank_stand_behind_its_messages():
    port = support.free_port()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        one, other = pool.map(
            lambda rank: _sockets.SocketComm(rank, 2, "127.0.0.1", port, timeout=10),
            range(2),
        )
    other.exchange([np.zeros(3)], 0, [], None)()  # which nobody receives
    other.abort("MemoryError: no room")
    with pytest.raises(ConnectionError, match="rank 1 has ended: MemoryError: no room"):
        send_for_ever(one)
    one.close()


def test_last_words_between_the_pieces_of_an_array():
    port = support.free_port()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        one, other = pool.map(
            lambda rank: _sockets.SocketComm(rank, 2, "127.0.0.1", port, timeout=10),
            range(2),
        )
        large = np.zeros(1 << 24)
        wait = other.exchange([large], 0, [], None)  # more than sockets hold
        received = pool.submit(
            lambda: one.exchange([], None, [np.empty_like(large)], 1)()
        )
        other.abort("MemoryError: no room")
        with pytest.raises(ConnectionError, match="rank 1 has ended: MemoryError: no"):
            received.result(10)
    with pytest.raises(ConnectionError, match="rank 1 has ended, after MemoryError"):
        wait()


def test_a_rank_that_dies_in_silence_is_not_waited_for():
    port = support.free_port()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        one, dead, other = pool.map(
            lambda rank: _sockets.SocketComm(rank, 3, "127.0.0.1", port, timeout=60),
            range(3),
        )
        dead.close()
        start = time.monotonic()
        with pytest.raises(ConnectionError, match="the connection with rank 1 has end"):
            send_for_ever(one)
        assert time.monotonic() - start < 20  # rank 2 lives, and says nothing
    other.close()


SCRIPT = """
import numpy as np
import fuzz_ranks
from cupyflash import distributed
from cupyflash.distributed._mpi import MpiComm
comm = distributed.connect(timeout=60)
assert isinstance(comm, MpiComm) and comm.size == 3
for seed in range(60):
    if fuzz_ranks.draw(seed)[0] == 3:
        assert fuzz_ranks.solve(comm, seed) is None, seed
x = np.ones((1, 6, 2))
try:
    distributed.attention(x, x, x, comm, softcap=comm.rank + 1.0)
except ValueError as error:
    assert "every rank must make the same call" in str(error)
    print("ranks agree", flush=True)
"""


@pytest.mark.skipif(
    not (importlib.util.find_spec("mpi4py") and shutil.which("mpiexec")),
    reason="needs mpi4py and mpiexec",
)
def test_mpi():
    path = [ROOT, ROOT / "tests/support", *filter(None, [os.environ.get("PYTHONPATH")])]
    result = subprocess.run(
        ["mpiexec", "-n", "3", sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("ranks agree") == 3
