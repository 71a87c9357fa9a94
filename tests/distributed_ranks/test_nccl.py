"""The NCCL transport: its logic beside a stand-in, itself where there is a GPU."""

import ctypes
import threading
import time
import types

import numpy as np
import pytest
import ranks as support

from cupyflash.distributed import _nccl
from cupyflash.distributed._sockets import SocketComm


class FakeEvent:
    done = True


class FakeStream:
    """Notes what it is given; `current` is the one of the computation."""

    def __init__(self, name, log):
        self.ptr, self.log = name, log

    def record(self):
        self.log.append(("record", self.ptr))
        event = FakeEvent()
        event.stream = self.ptr
        return event

    def wait_event(self, event):
        self.log.append((self.ptr, "waits for", event.stream))


class FakeDevice:
    def __init__(self, number):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class FakeNccl(types.SimpleNamespace):
    """What goes from a rank to another lies in a box until that one takes it."""

    NCCL_UINT8 = 1

    class NcclError(RuntimeError):
        pass

    def __init__(self, boxes, log):
        super().__init__(boxes=boxes, log=log, posted=None)
        outer = self

        class NcclCommunicator:
            def __init__(self, size, key, rank):
                assert key == b"the name"
                self.rank = rank

            def send(self, pointer, count, dtype, peer, stream):
                data = ctypes.string_at(pointer, count)
                outer.posted.append(("send", self.rank, peer, data, stream))

            def recv(self, pointer, count, dtype, peer, stream):
                outer.posted.append(("recv", peer, self.rank, (pointer, count), stream))

            def check_async_error(self):
                outer.log.append("checked")

            def abort(self):
                outer.log.append("aborted")

            def destroy(self):
                outer.log.append("destroyed")

        self.NcclCommunicator = NcclCommunicator

    def get_unique_id(self):
        return b"the name"

    def groupStart(self):
        assert self.posted is None
        self.posted = []

    def groupEnd(self):
        posted, self.posted = self.posted, None
        assert {stream for *_, stream in posted} <= {"transfers"}
        for kind, source, target, data, _ in posted:
            if kind == "send":
                self.boxes[source, target].put(data)
        for kind, source, target, place, _ in posted:
            if kind == "recv":
                data = self.boxes[source, target].get(timeout=20)
                pointer, count = place
                assert len(data) == count
                ctypes.memmove(pointer, data, count)


def on_pointer(x):
    """A NumPy array with its address where CuPy's have theirs."""
    fake = types.SimpleNamespace(nbytes=x.nbytes, array=x)
    fake.data = types.SimpleNamespace(ptr=x.ctypes.data)
    return fake


def fake_modules(boxes, log):
    current = FakeStream("current", log)
    cuda = types.SimpleNamespace(
        Device=FakeDevice,
        Stream=lambda non_blocking, priority: FakeStream("transfers", log),
        get_current_stream=lambda: current,
    )
    return types.SimpleNamespace(cuda=cuda), FakeNccl(boxes, log)


def on_threads(size, function, monkeypatch, broken=(), change=None, timeout=20.0):
    """function(comm, log) on ranks that are threads; what each returned or raised.

    `change(rank, nccl)` is made to the stand-in of a rank before it is used.
    """
    import queue

    boxes = {(a, b): queue.Queue() for a in range(size) for b in range(size)}
    port, results, by_thread = support.free_port(), [None] * size, {}

    def modules():
        rank, log = by_thread[threading.get_ident()]
        if rank in broken:
            raise ImportError("no libnccl here")
        cupy, nccl = fake_modules(boxes, log)
        if change is not None:
            change(rank, nccl)
        return cupy, nccl

    monkeypatch.setattr(_nccl, "_modules", modules)

    def work(rank):
        log = []
        by_thread[threading.get_ident()] = rank, log
        limit = timeout[rank] if isinstance(timeout, tuple) else timeout
        host = SocketComm(rank, size, "127.0.0.1", port, timeout=limit)
        try:
            results[rank] = function(_nccl.NcclComm(host, 0), log)
        except Exception as error:
            results[rank] = error
        finally:
            host.close()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_arrays_go_round_on_a_stream_of_their_own(monkeypatch):
    def round_trip(comm, log):
        mine, other = np.full(5, comm.rank), np.empty(5, int)
        target, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        wait = comm.exchange([on_pointer(mine)], target, [on_pointer(other)], source)
        posted = list(log)
        wait()
        comm.finish()
        comm.close()
        assert (other == source).all()
        return posted, log

    for posted, log in on_threads(3, round_trip, monkeypatch):
        # After what was computed before, not later than what is computed next, and
        # before what follows the wait.
        assert posted == [
            ("record", "current"),
            ("transfers", "waits for", "current"),
            ("record", "transfers"),
            ("current", "waits for", "transfers"),
            ("record", "transfers"),
        ]
        assert log[5:] == [("current", "waits for", "transfers"), "destroyed"]


def test_a_rank_without_nccl_ends_all(monkeypatch):
    found = on_threads(2, lambda comm, log: None, monkeypatch, broken={1})
    assert all(isinstance(x, ImportError) for x in found)
    assert str(found[0]) == "rank 1 has no NCCL: no libnccl here"


def test_a_transfer_that_never_ends(monkeypatch):
    monkeypatch.setattr(FakeEvent, "done", False)

    def stuck(comm, log):
        comm.timeout = 0.2 if comm.rank else 20.0
        x = on_pointer(np.zeros(2))
        comm.exchange([x], 1 - comm.rank, [on_pointer(np.zeros(2))], 1 - comm.rank)
        try:
            comm.finish()
        except (ConnectionError, TimeoutError) as error:
            text = str(error)
        with pytest.raises(ConnectionError, match=f"rank {comm.rank} has ended"):
            comm.exchange([x], 1 - comm.rank, [], None)
        return text, log

    (text, log), (own, _) = on_threads(2, stuck, monkeypatch)
    assert "did not arrive within 0.2 s" in own
    assert text.startswith("rank 1 has ended")  # told, not waited for
    assert "aborted" in log
    assert "checked" in log


def test_a_communicator_that_is_never_made(monkeypatch):
    """NCCL waits without end for a rank that has not come to it."""
    never = threading.Event()

    def hang(rank, nccl):
        nccl.NcclCommunicator.__init__ = lambda *_: never.wait(20)

    start = time.monotonic()
    told, own = on_threads(
        2, lambda comm, log: None, monkeypatch, change=hang, timeout=(20.0, 0.3)
    )
    never.set()
    assert time.monotonic() - start < 10
    assert isinstance(own, TimeoutError)
    assert "NCCL did not connect all ranks within 0.3 s (timeout= of connect)" in str(
        own
    )
    assert isinstance(told, ConnectionError)  # by the other, long before its own limit
    assert str(told).startswith("rank 1 has ended: NCCL did not connect")


def test_a_pair_that_never_connects(monkeypatch):
    """It does so at its first exchange; those after it wait on the device alone."""
    never = threading.Event()

    def hang(rank, nccl):
        plain, nccl.calls = nccl.groupEnd, 0

        def end():
            nccl.calls += 1
            if nccl.calls == 3:
                never.wait(20)
            plain()

        nccl.groupEnd = end

    def work(comm, log):
        other = 1 - comm.rank
        x, y = np.arange(3.0), np.empty(3)
        for _ in range(2):
            comm.exchange([on_pointer(x)], other, [on_pointer(y)], other)()
        np.testing.assert_array_equal(x, y)
        with pytest.raises((TimeoutError, ConnectionError)) as error:
            comm.exchange([on_pointer(x)], other, [], None)
        return str(error.value), log

    found = on_threads(2, work, monkeypatch, change=hang, timeout=(20.0, 0.3))
    never.set()
    (told, log), (own, _) = found
    assert own.startswith("NCCL did not connect all ranks")
    assert told.startswith("rank 1 has ended: NCCL did not connect")
    assert "aborted" in log


def test_a_communicator_that_is_refused(monkeypatch):
    def refuse(rank, nccl):
        def raising(*_):
            raise nccl.NcclError("NCCL_ERROR_INVALID_USAGE: invalid usage")

        nccl.NcclCommunicator.__init__ = raising

    for error in on_threads(2, lambda comm, log: None, monkeypatch, change=refuse):
        assert isinstance(error, ConnectionError)
        assert "invalid usage" in str(error)


def test_an_error_of_nccl(monkeypatch):
    def fail(comm, log):
        def broken():
            raise comm._nccl.NcclError("unhandled system error")

        comm._nccl.groupEnd = broken
        with pytest.raises(ConnectionError, match="NCCL has failed: unhandled"):
            comm.exchange([on_pointer(np.zeros(2))], 1, [], None)
        return log

    for log in on_threads(2, fail, monkeypatch):
        assert "aborted" in log


def test_the_calls_of_this_cupy():
    """What the stand-in takes is what the binding takes, where NCCL can be loaded."""
    nccl = pytest.importorskip("cupy.cuda.nccl", exc_type=ImportError)
    if not nccl.available:
        pytest.skip("CuPy finds no NCCL")
    name = nccl.get_unique_id()
    assert (type(name), len(name)) == (bytes, 128)
    kind = nccl.NcclCommunicator
    assert kind.__doc__.startswith("NcclCommunicator(int ndev, bytes commId, int rank")
    for post, what in ((kind.send, "sendbuf"), (kind.recv, "recvbuf")):
        assert (
            f"(self, intptr_t {what}, size_t count, int datatype, int peer, "
            "intptr_t stream)" in post.__doc__
        )
    for method in ("check_async_error", "abort", "destroy"):
        assert callable(getattr(kind, method))
    assert isinstance(nccl.NCCL_UINT8, int)
    assert issubclass(nccl.NcclError, Exception)
    nccl.groupStart()
    nccl.groupEnd()


@pytest.mark.gpu
def test_nccl_on_one_gpu():
    """A rank that sends to itself, through NCCL, on the stream of transfers."""
    import cupy
    from cupy.cuda import nccl

    if not nccl.available:
        pytest.skip("CuPy finds no NCCL")
    host = SocketComm(0, 1, "127.0.0.1", 0)
    comm = host.for_arrays(cupy.zeros(1))
    x = cupy.arange(1 << 20, dtype="float32")
    y = cupy.zeros_like(x)
    x += 1  # the transfer comes after it
    wait = comm.exchange([x], 0, [y], 0)
    wait()
    z = y * 2
    comm.finish()
    cupy.testing.assert_array_equal(z, 2 * x)
    host.close()
