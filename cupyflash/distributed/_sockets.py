"""Ranks joined by TCP: arrays in host memory, and short messages."""

import contextlib
import ipaddress
import queue
import select
import socket
import struct
import threading
import time

from cupyflash.distributed._comm import TIMEOUT, Comm, bytes_of, nothing, shifted

_HELLO = b"cupyflash ranks 1"
_FRAME = struct.Struct("!cQ")  # what it is, and its bytes
_ARRAYS, _MESSAGE, _FAILURE = b"a", b"m", b"f"
_AT_ONCE = 1 << 20  # bytes between two looks at the clock
_LONGEST_TEXT = 1 << 12
_LONGEST_WORDS = _FRAME.size + _LONGEST_TEXT
_A_MOMENT = 5.0  # seconds in which a thread sees that its connections are gone
_TO_TELL = 1.0  # seconds in which a rank that ends tells the others why


class SocketComm(Comm):
    """Ranks on one machine or several, each connected with each.

    Parameters
    ----------
    rank, size : int
        This process, and how many there are.
    host, port : str, int
        Where rank 0 listens for the others.
    timeout : float
        Seconds to wait for the others when connecting, and for each message.

    Notes
    -----
    Only numbers and text are sent, never Python objects. The sockets are neither
    encrypted nor authenticated: for networks that you trust.
    """

    def __init__(self, rank, size, host, port, *, timeout=TIMEOUT, local_rank=0):
        super().__init__(rank, size, timeout=timeout, local_rank=local_rank)
        self._failure = None
        self._lock = threading.Condition()
        self._peers = _connect_all(rank, size, host, port, timeout)
        # Held for each piece that is sent: last words stand between two of them.
        self._pieces = {rank: threading.Lock() for rank in self._peers}
        # The rank that is being received from, those that have hung up, and why.
        self._source, self._gone, self._words = None, set(), {}
        # One thread sends and one receives, each in the order of the posts: all ranks
        # post in one order, with one target and one source a post.
        self._to_send, self._to_receive = queue.SimpleQueue(), queue.SimpleQueue()
        self._threads = {
            jobs: threading.Thread(target=self._work, args=(jobs,), daemon=True)
            for jobs in (self._to_send, self._to_receive)
        }
        for thread in self._threads.values():
            thread.start()

    def exchange(self, sent, target, received, source):
        jobs = []
        if target is not None:
            parts = [bytes_of(x) for x in sent]
            jobs.append(self._post(self._to_send, self._send, target, _ARRAYS, parts))
        if source is not None:
            parts = [bytes_of(x) for x in received]
            jobs.append(self._post(self._to_receive, self._receive, source, parts))
        return (lambda: self._wait(jobs)) if jobs else nothing

    def all_gather(self, message):
        found = [message] * self.size
        ranks = [shifted(self, shift) for shift in range(1, self.size)]
        parts = [memoryview(message)]
        sent = [
            self._post(self._to_send, self._send, target, _MESSAGE, parts)
            for target, _ in ranks
        ]
        received = [
            self._post(self._to_receive, self._receive_message, source)
            for _, source in ranks
        ]
        self._wait(sent + received)
        for (_, source), job in zip(ranks, received, strict=True):
            found[source] = job.result
        return found

    def check(self):
        with self._lock:
            if self._failure is not None:
                raise _again(self._failure)
        readable, _, _ = select.select(list(self._peers.values()), [], [], 0)
        for rank, peer in self._peers.items():
            if peer in readable:
                with self._naming(rank, "send"):
                    head = peer.recv(1, socket.MSG_PEEK)
                if not head:
                    raise _Lost(rank)
                if head == _FAILURE:
                    raise self._last_words(rank) or _Lost(rank)

    def abort(self, reason):
        with self._lock:
            if self._failure is None:
                self._failure = ConnectionError(
                    f"rank {self.rank} has ended, after {reason}; connect() again"
                )
        text = reason.encode()[:_LONGEST_TEXT]
        deadline = time.monotonic() + _TO_TELL
        for rank, peer in self._peers.items():
            # A peer that does not read gets no reason.
            if not self._pieces[rank].acquire(timeout=_left(deadline)):
                continue
            with contextlib.suppress(OSError):
                peer.settimeout(_left(deadline))
                peer.sendall(_FRAME.pack(_FAILURE, len(text)) + text)
            self._pieces[rank].release()
        self._hang_up()

    def close(self):
        self._close_gpus()
        with self._lock:
            if self._failure is None:
                self._failure = ConnectionError("this comm is closed")
        self._hang_up()

    def _hang_up(self):
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)  # what was sent still arrives
        for jobs, thread in self._threads.items():
            jobs.put(None)
            thread.join(_A_MOMENT)
        for peer in self._peers.values():
            peer.close()

    # --- jobs of the two threads

    def _post(self, jobs, function, *arguments):
        job = _Job(function, arguments)
        with self._lock:
            if self._failure is not None:
                raise _again(self._failure)
        jobs.put(job)
        return job

    def _wait(self, jobs):
        """Results of jobs; the first error ends this rank's connections."""
        with self._lock:
            self._lock.wait_for(
                lambda: all(job.done for job in jobs) or any(job.error for job in jobs)
            )
        for job in jobs:
            if job.error is not None:
                error = self._reason(job.error)
                self.abort(str(error))
                raise _again(error)

    def _reason(self, error):
        """An error; if a rank has hung up, better why, if that can still be read."""
        with self._lock:
            if self._failure is not None:  # this rank hung up first
                return self._failure
        if not isinstance(error, _Lost):
            return error
        rank = error.rank
        with self._lock:
            # The other thread may be about to read it. Nothing after that is needed.
            self._gone.add(rank)
            self._lock.wait_for(lambda: self._source != rank, _A_MOMENT)
            if self._source != rank and rank not in self._words:
                self._read_to_the_end(rank)
        for other in (rank, *self._peers):
            found = self._words.get(other) or self._last_words(other)
            if found:
                return found
        return error

    def _work(self, jobs):
        while (job := jobs.get()) is not None:
            try:
                if jobs is self._to_receive:
                    self._begin(job.arguments[0])
                job.result = job.function(*job.arguments)
            except Exception as error:
                job.error = error
            with self._lock:
                job.done = True
                if jobs is self._to_receive:
                    self._source = None
                self._lock.notify_all()

    def _begin(self, source):
        with self._lock:
            if source in self._gone:
                raise _Lost(source)
            self._source = source

    def _send(self, target, kind, parts):
        size = sum(part.nbytes for part in parts)
        for part in (_FRAME.pack(kind, size), *parts):
            part = memoryview(part)
            while part.nbytes:
                with self._naming(target, "take"), self._pieces[target]:
                    if self._failure is not None:
                        raise _again(self._failure)
                    count = self._peers[target].send(part[:_AT_ONCE])
                part = part[count:]

    def _receive(self, source, parts):
        kind, size = self._read_head(source)
        expected = sum(part.nbytes for part in parts)
        if (kind, size) != (_ARRAYS, expected):
            raise _out_of_step(self, source)
        self._fill(source, parts)

    def _receive_message(self, source):
        kind, size = self._read_head(source)
        if kind != _MESSAGE:
            raise _out_of_step(self, source)
        return self._read(source, size)

    def _read_head(self, source):
        kind, size = _FRAME.unpack(self._read(source, _FRAME.size))
        if kind == _FAILURE:
            text = self._read(source, min(size, _LONGEST_TEXT))
            self._words[source] = _ended(source, text)
            raise self._words[source]
        return kind, size

    def _read(self, source, size):
        found = bytearray(size)
        self._fill(source, [memoryview(found)])
        return bytes(found)

    def _fill(self, source, parts):
        whole = []  # what was received
        for part in parts:
            filled = 0
            while filled < part.nbytes:
                with self._naming(source, "send", [*whole, part[:filled]]):
                    at_once = part[filled : filled + _AT_ONCE]
                    count = self._peers[source].recv_into(at_once)
                    if not count:
                        raise ConnectionError
                filled += count
            whole.append(part)

    @contextlib.contextmanager
    def _naming(self, rank, verb, received=()):
        """Errors of a socket as errors about a rank."""
        try:
            yield
        except TimeoutError:
            raise TimeoutError(
                f"rank {rank} did not {verb} what it should within {self.timeout:g} s "
                "(timeout= of connect); it hangs, or takes longer than that"
            ) from None
        except OSError as error:
            tail = b"".join(part[-_LONGEST_WORDS:] for part in received)
            raise self._last_words(rank, tail) or _Lost(rank, error) from None

    def _last_words(self, rank, before=b""):
        """Why a rank has ended, if that is what it sent last; leaves it to be read.

        It may interrupt arrays, of which the end was received `before`.
        """
        peer = self._peers[rank]
        with contextlib.suppress(OSError, ValueError):  # closed
            if select.select([peer], [], [], 0)[0]:
                before += peer.recv(_AT_ONCE, socket.MSG_PEEK)
        return self._found(rank, before)

    def _read_to_the_end(self, rank):
        """Find the last words of a rank behind all that it sent."""
        tail, peer = b"", self._peers[rank]
        with contextlib.suppress(OSError):
            peer.settimeout(0)
            while more := peer.recv(_AT_ONCE):
                tail = (tail + more)[-_LONGEST_WORDS:]
        self._found(rank, tail)

    def _found(self, rank, sent):
        """The error of the last words at the end of what a rank sent, or None."""
        # Behind arrays and messages that nobody will read any more.
        first, last = len(sent) - _LONGEST_WORDS, len(sent) - _FRAME.size
        for at in range(max(0, first), last + 1):
            kind, size = _FRAME.unpack_from(sent, at)
            text = sent[at + _FRAME.size :]
            if (kind, size) == (_FAILURE, len(text)):
                self._words[rank] = _ended(rank, text)
                return self._words[rank]
        return None


class _Job:
    """A call that a thread makes, and what became of it."""

    def __init__(self, function, arguments):
        self.function, self.arguments = function, arguments
        self.done, self.result, self.error = False, None, None


def _ended(rank, text):
    return ConnectionError(f"rank {rank} has ended: {text.decode(errors='replace')}")


class _Lost(ConnectionError):
    """A connection that has ended without a word; users see a ConnectionError."""

    def __init__(self, rank, error=""):
        cause = f": {error}" if str(error) else ""
        super().__init__(
            f"the connection with rank {rank} has ended{cause}; that process died or "
            "left before the others were done: its own error, if it printed one, says "
            "why"
        )
        self.rank = rank


def _again(error):
    """An error as a new one, so that each raise has its own traceback."""
    kind = ConnectionError if isinstance(error, _Lost) else type(error)
    return kind(*error.args)


def _out_of_step(comm, source):
    return ConnectionError(
        f"ranks {comm.rank} and {source} are not in the same call: every rank must "
        "make the same calls in the same order"
    )


# --- the start


def _connect_all(rank, size, host, port, timeout):
    """{rank: socket} of all others; rank 0 tells each where the others listen."""
    if size == 1:
        return {}
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        peers = _call_each_other(rank, size, host, port, deadline, stack)
        stack.pop_all()
    for peer in peers.values():
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.settimeout(timeout)
    return peers


def _call_each_other(rank, size, host, port, deadline, stack):
    """The sockets, which `stack` closes if not all are there in the end."""
    peers = {}
    own = _own_address(host)
    # From other machines rank 0 may have another address than its own.
    everywhere = rank == 0 and not ipaddress.ip_address(own).is_loopback
    with _listen("" if everywhere else own, 0 if rank else port) as listener:
        if rank == 0:
            places = [""] * size
            while len(peers) < size - 1:
                peer, found, place = _accept(listener, size, deadline, peers)
                peers[found], places[found] = stack.enter_context(peer), place
            table = "\n".join(places).encode()
            for peer in peers.values():
                peer.sendall(struct.pack("!I", len(table)) + table)
        else:
            place = f"{own} {listener.getsockname()[1]}"
            peers[0] = _call(host, port, rank, size, place, deadline, stack)
            places = _places(peers[0], size)
            for other in range(1, rank):
                address, _, number = places[other].rpartition(" ")
                peers[other] = _call(
                    address, int(number), rank, size, "", deadline, stack
                )
            while len(peers) < size - 1:
                peer, found, _ = _accept(listener, size, deadline, peers)
                peers[found] = stack.enter_context(peer)
    return peers


def _places(peer, size):
    """Where each rank listens, told by rank 0 once all have called it."""
    try:
        (length,) = struct.unpack("!I", _exactly(peer, 4))
        return _exactly(peer, length).decode().split("\n")
    except TimeoutError:
        raise TimeoutError(
            f"not all {size} ranks reached rank 0 in time; some were not started, or "
            "not with this address (MASTER_ADDR, MASTER_PORT)"
        ) from None


def _own_address(host):
    """The address of this machine, as seen from there."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ConnectionError(
            f"MASTER_ADDR is not the address of a machine: {host!r} ({error})"
        ) from None
    family, _, _, _, address = found[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return probe.getsockname()[0]


def _listen(host, port):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=256)
    except OSError as error:
        raise ConnectionError(
            f"rank 0 cannot listen on port {port}: {error}; set CUPYFLASH_PORT to a "
            "free port, the same on all ranks"
        ) from None


def _accept(listener, size, deadline, known):
    """(socket, rank, where it listens) of the next rank that calls."""
    while True:
        try:
            listener.settimeout(_left(deadline))
            peer, _ = listener.accept()
            with contextlib.ExitStack() as stack:
                stack.enter_context(peer).settimeout(_left(deadline))
                if _exactly(peer, len(_HELLO)) != _HELLO:
                    continue  # a stranger
                rank, of, length = struct.unpack("!III", _exactly(peer, 12))
                place = _exactly(peer, length).decode()
                stack.pop_all()
            break
        except TimeoutError:
            raise TimeoutError(
                f"{size - 1 - len(known)} of {size} ranks did not connect in time "
                f"(connected: {sorted(known)}); they were not started, or not with "
                "this address (MASTER_ADDR, MASTER_PORT)"
            ) from None
        except ConnectionError:
            continue
    if of != size or rank in known or not 0 <= rank < size:
        peer.close()
        raise ConnectionError(
            f"a process connected as rank {rank} of {of}, but {size} ranks are "
            f"expected and {sorted(known)} are already there; do two jobs share a "
            "port?"
        )
    return peer, rank, place


def _call(host, port, rank, size, place, deadline, stack):
    """A connection to a rank that listens, or will soon."""
    while True:
        try:
            peer = socket.create_connection((host, port), timeout=_left(deadline))
            break
        except OSError as error:
            if time.monotonic() > deadline - 0.1:
                raise TimeoutError(
                    f"rank {rank} could not reach {host}:{port} in time: {error}; is "
                    "rank 0 running, with this MASTER_ADDR and MASTER_PORT?"
                ) from None
            time.sleep(0.05)
    stack.enter_context(peer).settimeout(_left(deadline))
    place = place.encode()
    peer.sendall(_HELLO + struct.pack("!III", rank, size, len(place)) + place)
    return peer


def _exactly(peer, count):
    found = b""
    while len(found) < count:
        more = peer.recv(count - len(found))
        if not more:
            raise ConnectionError("a rank left before all were connected")
        found += more
    return found


def _left(deadline):
    return max(deadline - time.monotonic(), 0.01)
