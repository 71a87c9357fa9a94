"""Which calls a rank makes and which keys it is sent, without any ranks."""

import itertools

import numpy as np
import pytest

from cupyflash._attention import problem as attention_problem
from cupyflash.distributed import _plan, _shards


def plan_of(size, seqlen_q, seqlen_k=None, zigzag=True, **options):
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    given = dict.fromkeys(
        ("bias", "mask", "scale", "sinks", "alibi_slopes", "query_offset", "window",
         "query_lengths", "key_lengths", "out")
    )  # fmt: skip
    given |= {"causal": False, "softcap": 0.0, "layout": "bhsd", "return_lse": True}
    given |= {"precision": "float32", "method": "auto"}
    q, k = (np.zeros((1, n, 1)) for n in (seqlen_q, seqlen_k))
    problem, _ = attention_problem.attention(q, k, k, **(given | options))
    queries, keys = (_shards.even_chunks(n, size, zigzag) for n in (seqlen_q, seqlen_k))
    return _plan.Plan(problem, 0, queries, keys)


def places(chunks):
    """The place in the whole of each row of a part."""
    return np.concatenate([np.arange(c.first, c.first + c.length) for c in chunks])


def seen(plan, rank, source):
    """The pairs that the calls of a rank count, as many times as they do."""
    p = plan.problem
    rows, columns = places(plan.queries[rank]), places(plan.keys[source])
    found = np.zeros((len(rows), len(columns)), int)
    for c in plan.calls(rank, source):
        i, j = np.mgrid[c.rows, c.keys]
        i, j = i - c.rows.start, j - c.keys.start
        here = np.ones(i.shape, bool)
        if c.masked:
            diagonal = i + p.query_offset + c.shift
            here &= j <= diagonal + (np.inf if p.right is None else p.right)
            here &= j >= diagonal - (np.inf if p.left is None else p.left)
        found[c.rows, c.keys] += here
    diagonal = rows[:, None] + p.query_offset
    want = columns <= diagonal + (np.inf if p.right is None else p.right)
    want &= columns >= diagonal - (np.inf if p.left is None else p.left)
    return found, want


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "query_offset": -9},
        {"causal": True, "query_offset": 5},
        {"window": (None, 4)},
        {"window": (6, 2)},
        {"causal": True, "window": 3},
    ],
    ids=str,
)
def test_each_pair_counts_once(size, zigzag, options):
    for seqlen_q, seqlen_k in ((24, 24), (25, 25), (3, 3), (8, 31), (31, 8), (0, 4)):
        plan = plan_of(size, seqlen_q, seqlen_k, zigzag, **options)
        for rank, source in itertools.product(range(size), repeat=2):
            found, want = seen(plan, rank, source)
            np.testing.assert_array_equal(found, want)
            first, end = plan.needed(rank, source)
            assert not want[:, :first].any()
            assert not want[:, end:].any()


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_zigzag_has_one_call_a_step_and_equal_work(size):
    plan = plan_of(size, 16 * size, causal=True)
    work = []
    for rank in range(size):
        calls = [plan.calls(rank, source) for source in range(size)]
        assert [len(found) for found in calls] == [1] * size
        assert [c.masked for found in calls for c in found] == [
            source == rank for source in range(size)
        ]
        work.append(sum(seen(plan, rank, source)[0].sum() for source in range(size)))
    assert len(set(work)) == 1
    # Of the keys of an earlier rank only the first half is seen, and sent.
    assert plan.needed(1, 0) == (0, 8)
    assert plan.needed(0, 1) == (0, 16)


def test_a_window_leaves_ranks_out():
    plan = plan_of(8, 128, zigzag=False, causal=True, window=(10, 0))
    for rank, source in itertools.product(range(8), repeat=2):
        assert bool(plan.calls(rank, source)) == (source in (rank, rank - 1))
    assert plan.needed(3, 2) == (0, 16)


def test_terms_of_positions_keep_pieces_apart():
    plan = plan_of(2, 16, causal=True, alibi_slopes=np.ones(1))
    assert len(plan.calls(0, 0)) == 3  # of four pairs of pieces one is hidden
    assert len(plan.calls(1, 1)) == 1  # whose pieces are neighbours: one


def test_unknown_lengths_leave_nothing_out():
    plan = plan_of(2, 16, causal=True, key_lengths=np.array(4))
    assert all(plan.calls(a, b) for a, b in itertools.product(range(2), repeat=2))


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("seqlen", [0, 1, 5, 16, 100])
def test_chunks_are_a_partition(seqlen, zigzag):
    for size in range(1, 6):
        chunks = _shards.even_chunks(seqlen, size, zigzag)
        rows = np.concatenate([places(part) for part in chunks])
        np.testing.assert_array_equal(np.sort(rows), np.arange(seqlen))
        counts = [sum(c.length for c in part) for part in chunks]
        assert max(counts) - min(counts) <= 1 + zigzag
        for part in chunks:
            assert [c.at for c in part] == [
                sum(c.length for c in part[:n]) for n in range(len(part))
            ]
