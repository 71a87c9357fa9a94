"""Times on paper of a sequence over many GPUs: measured kernels, published links.

No GPU is needed: kernel rates are read from results/attention_table_h200.json and
attention_vjp_table_h200.json, link rates are the constants below. What it prints stands
in docs/design/decisions/several-gpus.md.

Usage: ring_model.py
"""

import functools
import json
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parent / "results"
HEADS, HEAD_DIM, BYTES = 16, 128, 2  # bfloat16, keys as many as queries

# Bytes a second in one direction, and seconds before the first byte.
NVLINK = 370e9, 10e-6  # of 450: what NCCL reaches (nccl-tests, issue 212)
NETWORK = 47e9, 30e-6  # NDR, one 400 Gbit/s card a GPU (nccl-tests, issues 290 and 214)
GPUS_A_NODE = 8

GROUPS = "bfloat16, D = 128", "gradients, bfloat16, D = 128"
MEMORY = 4.0e12  # bytes a second of H200, read and written
LAUNCHES = 60e-6  # assumed: the host, for a step of the ring
ROWS_TO_FILL = 132 * 128 / HEADS  # a tile of 128 queries of a head on each SM


def rates(file, causal):
    """(lengths, operations a second) of our kernels, 16 heads of 128 columns."""
    rows = json.loads((RESULTS / file).read_text())["table"]
    found = {
        row["seqlen_q"]: row["rate"]
        for row in rows
        if row["provider"] == "cupyflash"
        and (row["num_heads"], row["num_kv_heads"]) == (HEADS, HEADS)
        and (row["head_dim"], row["dtype"]) == (HEAD_DIM, "bfloat16")
        and row["causal"] == causal
        and row["seqlen_q"] == row["seqlen_k"]
        and row["group"] in GROUPS
    }
    return sorted(found), [found[n] for n in sorted(found)]


RATES = {
    (backward, causal): rates(
        f"attention_{'vjp_' if backward else ''}table_h200.json", causal
    )
    for backward in (False, True)
    for causal in (False, True)
}


def compute(rows, keys, backward=False, causal=False):
    """Seconds of one call; few rows do not fill the card."""
    pairs = rows * keys / (2 if causal else 1)
    lengths, speeds = RATES[backward, causal]
    rate = np.interp(min(rows, keys), lengths, speeds) * min(1, rows / ROWS_TO_FILL)
    return (10 if backward else 4) * HEADS * HEAD_DIM * pairs / rate


def tensor(rows):
    """Bytes of one of q, k, v and out."""
    return HEADS * HEAD_DIM * BYTES * rows


def transfer(size, gpus):
    """Seconds of a step's arrays by the slowest link that some pair has."""
    speed, latency = NETWORK if gpus > GPUS_A_NODE else NVLINK
    return latency + size / speed


def one_gpu(seqlen, causal, backward):
    """Seconds without a ring."""
    return compute(seqlen, seqlen, backward, causal)


def ring(seqlen, gpus, causal=False, zigzag=True, backward=False):
    """(seconds, share of the transfer that is hidden) of the slowest rank."""
    rows = seqlen // gpus
    # In a zigzag half of the pairs, else the last rank sees all, causal or not.
    keys = rows / 2 if causal and zigzag else rows
    steps = [compute(rows, keys, backward)] * (gpus - 1)
    sent = [2 * tensor(rows)] * (gpus - 1)  # the most that a rank is sent
    own = compute(rows, rows, backward, causal)
    # Each part is read once where parts are joined; a gradient is added in float32.
    join = (10 * 3 if backward else 2) / BYTES * tensor(rows) / MEMORY
    busy = [max(x + join, LAUNCHES) for x in [own, *steps]]
    if backward:  # parts of dk and dv go home beside the next keys
        sent = [2 * size for size in sent]
    moves = [transfer(size, gpus) for size in sent]
    # A step's arrays travel during the step before.
    waits = [max(move - work, 0) for move, work in zip(moves, busy, strict=False)]
    return sum(busy) + sum(waits), 1 - sum(waits) / sum(moves)


def decode(keys, gpus, heads=32, kv_heads=8):
    """Seconds of one query over keys that lie on all ranks, joined along a tree.

    A rank has its own part of keys only read, the states (out and lse) of the others
    come in log2(gpus) rounds of small messages.
    """
    size = 2 * kv_heads * HEAD_DIM * BYTES * keys / gpus
    read = max(12e-6, size / 3.83e12)  # 131,072 keys were measured in 140 us
    speed = {True: NETWORK, False: NVLINK}
    rounds, reach = 0.0, 1
    while reach < gpus:
        rate, latency = speed[reach >= GPUS_A_NODE]
        rounds += latency + heads * (HEAD_DIM + 1) * 4 / rate + 5e-6  # and one join
        reach *= 2
    return read + rounds


def first(holds, lengths):
    """The least of some lengths from which on it holds for all, as text."""
    found = ""
    for seqlen in reversed(lengths):
        if not holds(seqlen):
            break
        found = f"{seqlen:,}"
    return found or "none"


def scales(seqlen, gpus, causal, backward):
    """Whether the GPUs (a zigzag, if causal) are worth nine tenths of their number."""
    alone = one_gpu(seqlen, causal, False)
    seconds, _ = ring(seqlen, gpus, causal)
    if backward:
        alone += one_gpu(seqlen, causal, True)
        seconds += ring(seqlen, gpus, causal, backward=True)[0]
    return alone / seconds >= 0.9 * gpus


def limits():
    """Lines of the table: the tokens or keys below which each way stops scaling."""
    lengths = [1 << n for n in range(12, 25)]
    for name, causal, backward in (
        ("ring, forward", False, False),
        ("ring, with backward", False, True),
        ("zigzag, forward", True, False),
        ("zigzag, with backward", True, True),
    ):
        yield (
            name,
            *(
                first(
                    functools.partial(scales, gpus=g, causal=causal, backward=backward),
                    lengths,
                )
                for g in (2, 8, 64)
            ),
        )
    yield (
        "decoding, faster than one GPU",
        *(
            first(lambda n, g=g: decode(n, g) < decode(n, 1), lengths)
            for g in (2, 8, 64)
        ),
    )
    yield (
        "decoding, faster than one node",
        "",
        "",
        first(lambda n: decode(n, 64) < decode(n, 8), lengths),
    )


def table(title, columns, rows):
    print(f"\n{title}\n")
    print("| " + " | ".join(columns) + " |")
    print("| --- " * len(columns) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


def speedups(gpus, backward):
    """Lines of the table: speedup and hidden share, by length."""
    for seqlen in (16_384, 131_072, 1_048_576):
        cells = [f"{seqlen:,}"]
        for causal, zigzag in ((False, False), (True, False), (True, True)):
            alone = one_gpu(seqlen, causal, False)
            seconds, hidden = ring(seqlen, gpus, causal, zigzag)
            if backward:
                alone += one_gpu(seqlen, causal, True)
                more, hidden = ring(seqlen, gpus, causal, zigzag, True)
                seconds += more
            cells.append(f"{alone / seconds:.1f} ({100 * hidden:.0f} %)")
        yield cells


def main():
    """Print the tables."""
    columns = ["tokens", "full", "causal, one piece a rank", "causal, zigzag"]
    for gpus in (2, 8, 64):
        for backward in (False, True):
            what = "forward and backward" if backward else "forward"
            table(
                f"{gpus} GPUs, {what}: times one GPU (share of transfer hidden)",
                columns,
                speedups(gpus, backward),
            )
    table(
        "Least power of two of tokens from which on the GPUs are worth 90 % of their "
        "number; for decoding, of keys",
        ["", "2 GPUs", "8 GPUs", "64 GPUs"],
        limits(),
    )
    table(
        "One query, 32 heads over 8 of keys: us",
        ["keys", "1 GPU", "8 GPUs", "64 GPUs"],
        (
            [f"{keys:,}", *(f"{1e6 * decode(keys, n):.0f}" for n in (1, 8, 64))]
            for keys in (8_192, 131_072, 1_048_576, 16_777_216)
        ),
    )


if __name__ == "__main__":
    main()
