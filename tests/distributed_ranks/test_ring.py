"""cupyflash.distributed over real processes, against the plain functions."""

import concurrent.futures
import itertools
import os
import random
import re
import time

import fuzz_ranks
import numpy as np
import oracle
import pytest
import ranks as support
import thread_ranks

import cupyflash
from cupyflash import distributed
from cupyflash.distributed import _ring
from cupyflash.distributed._sockets import SocketComm

PARTS = _ring._Parts


@pytest.mark.parametrize("first", range(0, 40, 8))
def test_random_problems(ranks, first):
    for seed in range(first, first + 8):
        found = ranks.all(fuzz_ranks.draw(seed)[0], fuzz_ranks.solve, seed)
        assert found == [None] * len(found), f"problem {seed}"


def of_rank(comm, seqlen):
    q = np.random.default_rng(0).normal(size=(2, seqlen, 4))
    part = distributed.shard(q, comm, causal=True)
    return distributed.attention(part, part, part, comm, causal=True)


@pytest.mark.parametrize("size", support.SIZES)
def test_zigzag(ranks, size):
    q = np.random.default_rng(0).normal(size=(2, 96, 4))
    want = cupyflash.attention(q, q, q, causal=True)
    pieces = np.split(want, 2 * size, axis=1)
    for rank, got in enumerate(ranks.all(size, of_rank, 96)):
        np.testing.assert_allclose(
            got, np.concatenate([pieces[rank], pieces[-1 - rank]], axis=1), atol=1e-14
        )


def test_one_rank_gives_what_the_plain_functions_give():
    rng = np.random.default_rng(0)
    q, dout = rng.normal(size=(2, 2, 4, 9, 3))
    k, v = rng.normal(size=(2, 2, 2, 9, 3))
    with distributed.connect() as comm:
        got = distributed.attention(q, k, v, comm, causal=True, return_lse=True)
        grads = distributed.attention_vjp(dout, q, k, v, *got, comm, causal=True)
    want = cupyflash.attention(q, k, v, causal=True, return_lse=True)
    theirs = cupyflash.attention_vjp(dout, q, k, v, *want, causal=True)
    for one, other in zip((*got, *grads[:3]), (*want, *theirs[:3]), strict=True):
        np.testing.assert_array_equal(one, other)
    assert grads[3:] == (None, None, None)


def keys_far_from_zero(dtype, options):
    """(q, k, v, dout, options), where dq is far smaller than its terms."""
    options = dict(options)
    rng = np.random.default_rng(3)
    batch = (2,) if options.pop("one q for all", False) else ()
    shift = 5 if dtype == "float32" else 30
    q, dout = rng.normal(size=(2, 4, 40, 32))
    k, v = rng.normal(size=(2, *batch, 2, 90, 32)) + 5
    if batch:
        dout = np.stack([dout, dout[::-1]])
    if options.pop("sinks", False):
        options["sinks"] = np.ones(4, dtype)
    options["dlse"] = options.get("dlse") and rng.normal(size=dout.shape[:-1])
    q, k, v, dout = (x.astype(dtype) for x in (q, k, v + shift, dout))
    if options["dlse"] is not None:
        options["dlse"] = options["dlse"].astype(dtype)
    return q, k, v, dout, options


def dq_over_ranks(comm, dtype, options):
    q, k, v, dout, options = keys_far_from_zero(dtype, options)
    dlse = options.pop("dlse")
    causal = options.get("causal", False)
    q, k, v, dout = (distributed.shard(x, comm, causal=causal) for x in (q, k, v, dout))
    if dlse is not None:
        dlse = distributed.shard(dlse, comm, -1, causal=causal)
    out, lse = distributed.attention(q, k, v, comm, return_lse=True, **options)
    grads = distributed.attention_vjp(
        dout, q, k, v, out, lse, comm, dlse=dlse, **options
    )
    return distributed.unshard(grads.dq, comm, causal=causal)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"causal": True}, {"causal": True, "softcap": 30.0}, {"sinks": True},
        {"dlse": True}, {"one q for all": True},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("float64", 1e-13)])
@pytest.mark.parametrize("size", [2, 3])
def test_dq_is_balanced_once_all_keys_were_seen(ranks, size, dtype, bound, options):
    """What a row of dS lacks of its sum is multiplied by keys far from zero."""
    q, k, v, dout, given = keys_far_from_zero(dtype, options)
    real = np.float64 if dtype == "float32" else np.longdouble
    exact, *_ = oracle.attention_vjp(dout, q, k, v, real=real, **given)
    for got in ranks.all(size, dq_over_ranks, dtype, options):
        error = np.abs(got - exact["dq"]).max()
        assert error <= bound * np.abs(exact["dq"]).max()


@pytest.mark.parametrize("seed", [910028, 910203, 910451])
def test_problems_that_failed(ranks, seed):
    """Of dq, where each rank balanced nothing; and of rows that see no key."""
    found = ranks.all(fuzz_ranks.draw(seed)[0], fuzz_ranks.solve, seed)
    assert found == [None] * len(found)


def with_nan(comm):
    """NaN in the last key, which no other query sees."""
    q = np.ones((1, 12, 2))
    q[0, -1] = np.nan
    part = distributed.shard(q, comm, causal=True)
    out = distributed.attention(part, part, part, comm, causal=True)
    return distributed.unshard(out, comm, causal=True)


def test_what_is_not_seen_does_not_reach_the_result(ranks):
    for out in ranks.all(3, with_nan):
        assert np.isnan(out[0, -1]).all()
        np.testing.assert_array_equal(out[0, :-1], 1)


def default_comm(comm):
    from cupyflash.distributed import _environment

    _environment.default.cache_clear()
    x = np.ones((4, 2))
    return distributed.attention(x, x, x)


def test_without_a_comm_there_is_one_a_process(ranks):
    np.testing.assert_array_equal(ranks.all(2, default_comm)[0], np.ones((4, 2)))


# --- what goes wrong


def mismatched(comm, name):
    # Of a length of its own: what all have agreed on once is not asked again.
    shape = (1, 100 + sum(name.encode()), 2)
    x = np.ones(shape)
    options = {
        "offset": {"query_offset": np.array(3)},
        "values": {"key_lengths": np.array(6)},
        "alike": {"scale": np.float64(1), "window": [3, 0]},
    }.get(name, {})
    if comm.rank == 1:
        options = {
            "alike": {"scale": 1, "window": (3, 0)},
            "option": {"softcap": 3.0},
            "array": {"sinks": np.zeros(1)},
            "offset": {"query_offset": 3},
            "values": {"key_lengths": np.array(5)},
            "unknown": {"is_causal": True},
            "return_lse": {"return_lse": 1},
            "refused": {"scale": "large"},
        }.get(name, {})
        x = {"dtype": x.astype("float32"), "shape": np.ones((*shape[:2], 3))}.get(
            name, x
        )
    try:
        distributed.attention(x, x, x, comm, **options)
    except (TypeError, ValueError) as error:
        text = str(error)
    else:
        text = "no error"
    # All have raised, so all can go on.
    x = np.ones(shape)
    np.testing.assert_array_equal(distributed.attention(x, x, x, comm), x)
    return text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("option", "softcap is 3.0 on rank 1 and 0.0 on rank 0"),
        ("array", r"sinks is float64 \(1\) on rank 1 and absent on rank 0"),
        ("dtype", r"q is float32 \(1, its part, 2\) on rank 1 and float64"),
        ("shape", r"q is float64 \(1, its part, 3\) on rank 1"),
        ("offset", r"query_offset is 3 on rank 1 and int64 \(\) on rank 0"),
        ("values", r"checksum of key_lengths is \d+ on rank 1 and \d+ on rank 0"),
        ("alike", "no error"),  # equal numbers of different types
        ("refused", "scale must be a real number, got a str"),
        ("unknown", "'is_causal'; here it is causal="),
        ("return_lse", "return_lse must be a bool, got int"),
    ],
)
def test_a_mismatch_ends_the_call_on_every_rank(ranks, name, words):
    for rank, text in enumerate(ranks.all(3, mismatched, name)):
        assert re.search(words, text), text
        if name in ("refused", "unknown", "return_lse") and rank != 1:
            assert text.startswith("rank 1 rejected its arguments: TypeError: ")


def of_any_length(comm, totals):
    """The largest error of causal calls over sequences of these lengths."""
    x = np.random.default_rng(0).normal(size=(2, max(totals), 4))
    errors = []
    for total in totals:
        whole = x[:, :total]
        part = distributed.shard(whole, comm, causal=True)
        out = distributed.attention(part, part, part, comm, causal=True)
        out = distributed.unshard(out, comm, causal=True)
        want = cupyflash.attention(whole, whole, whole, causal=True)
        errors.append(abs(out - want).max())
    return max(errors)


def test_one_part_may_belong_to_several_sequences(ranks):
    """Rank 0 has 5 places of 10 and of 11, rank 1 has 6 of 11 and of 12."""
    for error in ranks.all(2, of_any_length, [10, 12, 11, 10]):
        assert error < 1e-14


def uneven(comm):
    """Parts of which one is as long as in a call before."""
    x = np.random.default_rng(0).normal(size=(1, 9, 2))
    for lengths in ([3, 0, 6], [3, 3, 3], [6, 0, 3]):
        first = sum(lengths[: comm.rank])
        part = x[:, first : first + lengths[comm.rank]]
        out = distributed.attention(part, part, part, comm)
        np.testing.assert_allclose(
            distributed.unshard(out, comm), cupyflash.attention(x, x, x), atol=1e-14
        )


def test_parts_of_any_lengths_in_turn(ranks):
    ranks.all(3, uneven)


def far_away(comm, options):
    x = np.random.default_rng(0).normal(size=(1, 8, 2))
    part = distributed.shard(x, comm)
    out = distributed.attention(part, part, part, comm, zigzag=False, **options)
    return distributed.unshard(out, comm), cupyflash.attention(x, x, x, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"query_offset": -(2**70), "window": (2**70, 2**70)},
        {"query_offset": 2**70, "window": (2**70, 0)},
        {"query_offset": 2**70, "causal": True},
        {"query_offset": -(2**70), "causal": True},
    ],
    ids=str,
)
def test_offsets_beyond_64_bits(ranks, options):
    for got, want in ranks.all(2, far_away, options):
        np.testing.assert_allclose(got, want, atol=1e-14)


def other_function(comm):
    x = np.ones((1, 6, 2))
    arguments = (x, comm) if comm.rank == 0 else (x, x, x, comm)
    function = distributed.attention if comm.rank else distributed.unshard
    with pytest.raises(ValueError, match="function is attention on rank 1 and unshard"):
        function(*arguments)
    distributed.attention(x, x, x, comm)


def test_ranks_that_call_different_functions(ranks):
    ranks.all(3, other_function)


def on_threads(comm):
    """The same calls by two threads of each rank."""
    x = np.ones((1, 6, 2))

    def calls():
        return [distributed.attention(x, x, x, comm) for _ in range(20)]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(calls) for _ in range(2)]:
            np.testing.assert_array_equal(each.result(), [x] * 20)


def test_calls_by_several_threads(ranks):
    ranks.all(2, on_threads)


def remembered(comm):
    for n in range(300):
        comm.made[n] = None
    x = np.ones((1, 7, 2))
    distributed.attention(x, x, x, comm)
    return len(comm.made)


def test_what_is_remembered_does_not_grow(ranks):
    assert ranks.all(2, remembered) == [1, 1]


def one_rank_fails(comm):
    if comm.rank == 1:
        comm.abort("MemoryError: too much")
        raise MemoryError("too much")
    x = np.ones((1, 6, 2))
    return distributed.attention(x, x, x, comm)


def hang(comm, seconds):
    comm.timeout = seconds
    for peer in comm._peers.values():
        peer.settimeout(seconds)
    if comm.rank == 1:
        time.sleep(4 * seconds)
        return None
    x = np.ones((1, 6, 2))
    return distributed.attention(x, x, x, comm)


def out_of_step(comm):
    x = np.ones((1, 6, 2))
    if comm.rank:
        return distributed.attention(x, x, x, comm)
    return comm.exchange([x], 1, [np.empty_like(x)], 2)()


def die(comm):
    if comm.rank == 1:
        os._exit(3)
    x = np.ones((1, 6, 2))
    return distributed.attention(x, x, x, comm)


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        (one_rank_fails, (), "MemoryError: too much"),
        (hang, (0.5,), "did not send what it should within 0.5 s"),
        (out_of_step, (), "not in the same call"),
    ],
)
def test_no_rank_waits_for_one_that_has_ended(function, arguments, words):
    with support.Ranks((3,)) as pool:
        found = pool.run(3, function, *arguments, within=20)
    others = [found[0], found[2]]
    assert all(isinstance(x, support.Failed) for x in others), found
    assert any(words in x.text for x in others), [x.text for x in others]
    assert {x.kind for x in others} <= {"ConnectionError", "TimeoutError"}


def test_a_rank_that_dies_ends_the_others():
    with support.Ranks((3,)) as pool:
        for pipe in pool._pipes:
            pipe.send((3, die, ()))
        for rank in (0, 2):
            assert pool._pipes[rank].poll(20), "a rank waits for a dead one"
            result = pool._pipes[rank].recv()
            assert result.kind == "ConnectionError"
            assert "rank 1" in result.text


def rank_1_raises(comm, ports, kind):
    """What each of several comms that rank 1 leaves, sooner or later, raises here."""
    found = []
    for seed, port in enumerate(ports):
        alike, own = random.Random(seed), random.Random(100 * seed + comm.rank)
        calls, delay = alike.randrange(4), alike.choice([0, 0, 0.01 * alike.random()])
        length = alike.choice([10, 1000, 100_000])
        if kind == "attention":
            length = 64
        x = np.ones((1, length, 16))
        rank, size = comm.rank, comm.size
        try:
            with SocketComm(rank, size, "127.0.0.1", port) as one:
                for call in itertools.count():
                    if rank == 1 and call == calls:
                        time.sleep(delay)
                        raise KeyError(f"case {seed}")
                    if rank != 1:
                        time.sleep(own.choice([0, 0, 0.001, 0.01]))
                    if kind == "attention":
                        distributed.attention(x, x, x, one)
                    elif kind == "messages":
                        one.all_gather(bytes(length))
                    else:
                        to, source = (rank + 1) % size, (rank - 1) % size
                        one.exchange([x], to, [np.empty_like(x)], source)()
        except (ConnectionError, KeyError) as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("size", support.SIZES)
@pytest.mark.parametrize("kind", ["attention", "messages", "arrays"])
def test_the_others_learn_why_a_rank_has_ended(ranks, size, kind):
    """At whatever moment it does: while they send, receive or compute."""
    ports = [support.free_port() for _ in range(20)]
    found = ranks.all(size, rank_1_raises, ports, kind)
    for rank in set(range(size)) - {1}:
        for seed, text in enumerate(found[rank]):
            assert re.match(r"rank \d has ended: ", text), text
            assert f"KeyError: 'case {seed}'" in text


def after_the_end(comm):
    comm.close()
    x = np.ones((1, 6, 2))
    return distributed.attention(x, x, x, comm)


def test_a_closed_comm_says_so():
    with support.Ranks((2,)) as pool:
        for result in pool.run(2, after_the_end):
            assert result.text == "this comm is closed"


def test_errors_in_words():
    x = np.ones((4, 2))
    with pytest.raises(TypeError, match=r"pass mpi4py communicators to connect"):
        distributed.attention(x, x, x, "world")
    with distributed.connect() as comm:
        with pytest.raises(TypeError, match=r"is_causal.*causal="):
            distributed.attention(x, x, x, comm, is_causal=True)
        with pytest.raises(
            TypeError, match="mask must be an array here, not a function"
        ):
            distributed.attention(x, x, x, comm, mask=lambda i, j: i == j)
        with pytest.raises(ValueError, match="bias must have 1 or 4 rows"):
            distributed.attention(x, x, x, comm, bias=np.ones((3, 4)))
        with pytest.raises(ValueError, match="the same head_dim"):
            distributed.attention(x, np.ones((4, 3)), x, comm)
        with pytest.raises(TypeError, match="causal must be a bool"):
            distributed.attention(x, x, x, comm, causal=1)
        with pytest.raises(TypeError, match="zigzag must be a bool"):
            distributed.attention(x, x, x, comm, zigzag=1)
        with pytest.raises(ValueError, match="key_lengths must be from 0 to"):
            distributed.attention(x, x, x, comm, key_lengths=np.array(5))
        with pytest.raises(TypeError, match="k must be an array, got None"):
            distributed.attention(x, comm=comm)


def not_a_zigzag(comm):
    x = np.ones((1, 4 + 2 * comm.rank, 2))
    try:
        distributed.attention(x, x, x, comm, causal=True)
    except ValueError as error:
        return str(error)
    return None


def test_parts_that_are_no_zigzag(ranks):
    for text in ranks.all(2, not_a_zigzag):
        assert "q has 4 positions of the sequence on rank 0" in text
        assert "zigzag=False" in text


def in_float16(comm, options):
    q = np.random.default_rng(0).normal(size=(2, 40, 4)).astype(np.float16)
    part = distributed.shard(q, comm, causal=True)
    out, lse = distributed.attention(
        part, part, part, comm, causal=True, return_lse=True, **options
    )
    return distributed.unshard(out, comm, causal=True), lse


@pytest.mark.parametrize("options", [{}, {"sinks": np.ones(2, np.float16)}], ids=str)
@pytest.mark.parametrize("at_once", [2, 3])
def test_parts_are_joined_along_a_tree(monkeypatch, at_once, options):
    """Of more levels than one, as ranks beyond eight have them."""
    whole = thread_ranks.run(5, in_float16, options)
    monkeypatch.setattr(_ring, "_JOINED_AT_ONCE", at_once)
    made = []
    monkeypatch.setattr(_ring, "_Parts", lambda *a: made.append(0) or PARTS(*a))
    for (out, lse), (want, its) in zip(
        thread_ranks.run(5, in_float16, options), whole, strict=True
    ):
        np.testing.assert_allclose(out, want, rtol=4e-3, atol=1e-3)
        np.testing.assert_allclose(lse, its, rtol=1e-6)
    assert len(made) >= 5 * 2
