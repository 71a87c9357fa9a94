"""Score and mask functions, beside the option that says the same and those of others.

    python benchmarks/bench_flex.py --json benchmarks/results/flex_h200.json
    python benchmarks/bench_flex.py --only "document 128 8192" --turns 3
    python benchmarks/bench_flex.py --names function flash-attn-4

FlexAttention is compiled by torch.compile and has the block mask of each case, which
FlashAttention-4 is given, too. Results of all are compared with float64 before they are
timed, for the last queries of a head. A peer that is not there, or fails, is left out.
Batch entries and heads make 16,384 tokens of 2,048 columns, or a longer sequence.
"""

import contextlib
import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import peers
import pytest
import timing

sys.path.append(str(timing.RESULTS.parents[1] / "tests" / "support"))
import rows as support_rows

import cupyflash
from cupyflash import scores
from cupyflash._cli import measure as _measure

_TOKENS, _COLUMNS, _LAST = 16_384, 2048, 64
_WINDOW, _CAP, _DOCUMENTS = 1024, 20.0, 16
FLEX = "flex_attention"
PEERS = (FLEX, peers.FLASH4)


@dataclass(frozen=True)
class Case:
    """A function: of cupyflash, the option that does the same, and of torch.

    `arrays` makes the named ones for (xp, heads, batch, seqlen); `option` is given them
    and is None where no option does. `flex` makes of torch and the arrays the keyword
    and the function of FlexAttention.
    """

    name: str
    functions: Callable[..., dict[str, Any]]
    flex: Callable[..., tuple[str, Any]]
    arrays: Callable[..., dict[str, Any]] = lambda xp, heads, batch, n: {}
    option: Callable[..., dict[str, Any]] | None = None


def _slopes(xp, heads, batch, n):
    return {"slopes": xp.exp2(-8 * xp.arange(1, heads + 1) / heads).astype("f4")}


def _table(xp, heads, batch, n):
    rng = xp.random.default_rng(3)
    return {"table": rng.standard_normal((32, heads), "f4")}


def _documents(xp, heads, batch, n):
    of_place = xp.arange(n) * _DOCUMENTS // n
    return {"documents": xp.tile(of_place.astype("i4"), (batch, 1))}


def _prefixes(xp, heads, batch, n):
    return {"prefix": xp.full(batch, n // 4, "i4")}


def _seen(xp, heads, batch, n):
    return {"seen": xp.random.default_rng(3).random((n, n), "f4") > 0.1}


def _flex_t5(torch, table):
    def score(s, b, h, i, j):
        distance = (i - j).abs()
        far = torch.log(distance.clamp(min=1) / 8.0) * (8 / math.log(16.0))
        far = torch.clamp(8 + far.to(torch.int32), max=15)
        bucket = torch.where(distance < 8, distance.to(torch.int32), far)
        return s + table[bucket + torch.where(j > i, 16, 0), h]

    return "score_mod", score


CASES = (
    Case(
        "alibi",
        lambda a: {"score": scores.alibi, "score_arrays": a},
        lambda torch, slopes: (
            "score_mod",
            lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(),
        ),
        _slopes,
        lambda a: {"alibi_slopes": a["slopes"]},
    ),
    Case(
        "softcap",
        lambda a: {"score": scores.softcap(_CAP)},
        lambda torch: (
            "score_mod",
            lambda s, b, h, i, j: _CAP * torch.tanh(s / _CAP),
        ),
        option=lambda a: {"softcap": _CAP},
    ),
    Case(
        "window",
        lambda a: {"mask": scores.sliding_window(_WINDOW)},
        lambda torch: (
            "mask_mod",
            lambda b, h, i, j: (i - j <= _WINDOW) & (j <= i),
        ),
        option=lambda a: {"window": (_WINDOW, 0)},
    ),
    Case(
        "document",
        lambda a: {"mask": scores.document, "mask_arrays": a},
        lambda torch, documents: (
            "mask_mod",
            lambda b, h, i, j: documents[b, i] == documents[b, j],
        ),
        _documents,
    ),
    Case(
        "t5",
        lambda a: {"score": scores.t5_bias(), "score_arrays": a},
        _flex_t5,
        _table,
    ),
    Case(
        "prefix",
        lambda a: {"mask": scores.prefix_lm, "mask_arrays": a},
        lambda torch, prefix: (
            "mask_mod",
            lambda b, h, i, j: (j <= i) | (j < prefix[b]),
        ),
        _prefixes,
    ),
    Case(
        "array",
        lambda a: {"mask": lambda i, j, *, seen: seen[i, j], "mask_arrays": a},
        lambda torch, seen: ("mask_mod", lambda b, h, i, j: seen[i, j]),
        _seen,
        lambda a: {"mask": a["seen"]},
    ),
)


def block_mask(torch, case, arrays, n):
    """Which blocks of 128 x 128 the mask of a case hides, and which it shows whole."""
    from torch.nn.attention import flex_attention as flex

    _, function = case.flex(torch, **arrays)
    of_entry = [x for name, x in arrays.items() if name != "seen"]
    batch = of_entry[0].shape[0] if of_entry else None
    return flex.create_block_mask(function, batch, None, n, n, device="cuda")


@contextlib.contextmanager
def left_out(peer, what):
    """Print what a peer says that fails, and go on without it."""
    try:
        yield
    except Exception as error:  # they raise what their compilers raise
        why = str(error).strip().splitlines()[:1]
        print(f"{peer} does not take {what}: {type(error).__name__} {why}", flush=True)


def flex_calls(torch, case, arrays, blocks, q, k, v, dout):
    """Calls of FlexAttention by direction."""
    from torch.nn.attention import flex_attention as flex

    torch._dynamo.reset()  # which compiles a function for so many shapes alone
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    how = {"block_mask": blocks}
    if blocks is None:
        how = {"score_mod": case.flex(torch, **arrays)[1]}

    def forward():
        with torch.no_grad():
            return compiled(q, k, v, **how)

    forward()
    out = compiled(q, k, v, **how)

    def backward():
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    return {"forward": forward, "backward": backward}


def flash4_calls(interface, how, q, k, v, dout):
    """Calls of FlashAttention-4 by direction; `how` has the arguments of each."""
    q, k, v, dout = (x.transpose(1, 2) for x in (q, k, v, dout))
    to_forward, to_backward = how
    out, lse, *_ = interface._flash_attn_fwd(q, k, v, return_lse=True, **to_forward)

    def forward():
        return interface._flash_attn_fwd(q, k, v, **to_forward)[0].transpose(1, 2)

    def backward():
        grads = interface._flash_attn_bwd(q, k, v, out, dout, lse, **to_backward)
        return tuple(x.transpose(1, 2) for x in grads[:3])

    forward()
    calls = {"forward": forward}
    with left_out(peers.FLASH4, "the gradients"):
        backward()
        calls["backward"] = backward
    return calls


def peer_calls(names, case, arrays, q, k, v, dout):
    """Calls of others, by name and direction."""
    torch = timing.optional("torch") if {*names} & {*PEERS} else None
    if torch is None:
        return {}
    heads, n = q.shape[1:3]
    q, k, v, dout = (timing.to_torch(torch, x) for x in (q, k, v, dout))
    arrays = {name: timing.to_torch(torch, x) for name, x in arrays.items()}
    is_mask = case.flex(torch, **arrays)[0] == "mask_mod"
    blocks = block_mask(torch, case, arrays, n) if is_mask else None
    calls = {}
    if FLEX in names:
        with left_out(FLEX, case.name):
            calls[FLEX] = flex_calls(torch, case, arrays, blocks, q, k, v, dout)
    if peers.FLASH4 not in names:
        return calls
    interface = timing.optional(peers.FLASH4_MODULE)
    functions = timing.optional("flash4_functions")
    if interface is None or functions is None:
        return calls
    with left_out(peers.FLASH4, case.name):
        how = (
            functions.mask(case.name, _WINDOW, arrays, blocks)
            if is_mask
            else functions.score(case.name, heads, _CAP, arrays)
        )
        calls[peers.FLASH4] = flash4_calls(interface, how, q, k, v, dout)
    if option := functions.options(case.name, _WINDOW):
        with left_out(peers.FLASH4, f"the option {case.name}"):
            name = f"{peers.FLASH4} option"
            calls[name] = flash4_calls(interface, (option, option), q, k, v, dout)
    return calls


def exact(xp, case, arrays, q, k, v, dout):
    """(out, dq) of the last queries of the first head in float64, and their scores."""
    n, dim = q.shape[-2:]
    i, j = xp.arange(n - _LAST, n)[:, None], xp.arange(n)[None, :]
    q, dout = (x[0, 0, -_LAST:].astype("f8") for x in (q, dout))
    k, v = (x[0, 0].astype("f8") for x in (k, v))
    s, derivative = q @ k.T * dim**-0.5, 1.0
    first = {name: x[:, 0] if name == "table" else x[0] for name, x in arrays.items()}
    if case.name == "alibi":
        s = s - first["slopes"] * abs(i - j)
    elif case.name == "softcap":
        tanh = xp.tanh(s / _CAP)
        s, derivative = _CAP * tanh, 1 - tanh**2
    elif case.name == "t5":
        distance = abs(i - j)
        far = xp.log((xp.maximum(distance, 1) / 8).astype("f4")) * np.float32(
            8 / np.log(16)
        )
        far = xp.minimum(8 + far.astype(int), 15)
        bucket = xp.where(distance < 8, distance, far) + xp.where(j > i, 16, 0)
        s = s + first["table"][bucket]
    else:
        seen = {
            "window": lambda: (i - j <= _WINDOW) & (j <= i),
            "document": lambda: first["documents"][i] == first["documents"][j],
            "prefix": lambda: (j <= i) | (j < first["prefix"]),
            "array": lambda: arrays["seen"][i, j],
        }[case.name]()
        s = xp.where(seen, s, -xp.inf)
    p = xp.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out = p @ v
    ds = p * (dout @ v.T - (dout * out).sum(-1, keepdims=True)) * derivative
    return out, ds @ k * dim**-0.5


def error(xp, got, wanted):
    """Of the last queries of the first head, relative to the largest number."""
    got = got if isinstance(got, xp.ndarray) else timing.from_torch(xp, got.detach())
    rest = got[0, 0, -_LAST:].astype("f8") - wanted
    return float(f"{float(abs(rest).max() / abs(wanted).max()):.2g}")


def measure(xp, case, dim, n, turns, passes, names):
    """A line for each pass and candidate."""
    heads, batch = _COLUMNS // dim, max(1, _TOKENS // n)
    rng = xp.random.default_rng(7)
    q, k, v, dout = (
        rng.standard_normal((batch, heads, n, dim), "f4").astype("f2") for _ in range(4)
    )
    arrays = case.arrays(xp, heads, batch, n)
    ways = {"function": case.functions(arrays)}
    if case.option is not None and "option" in names:
        ways["option"] = case.option(arrays)
    calls: dict[str, dict[str, Any]] = {"forward": {}, "backward": {}}
    for name, options in ways.items():
        out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
        calls["forward"][name] = lambda options=options: cupyflash.attention(
            q, k, v, **options
        )
        calls["backward"][name] = lambda options=options, out=out, lse=lse: (
            cupyflash.attention_vjp(dout, q, k, v, out, lse, **options)
        )
    for name, of_peer in peer_calls(names, case, arrays, q, k, v, dout).items():
        for direction, call in of_peer.items():
            calls[direction][name] = call
    wanted = exact(xp, case, arrays, q, k, v, dout)
    for direction in passes:
        errors = {}
        for name, call in calls[direction].items():
            got = call()
            got = got if direction == "forward" else got[0]
            errors[name] = error(xp, got, wanted[direction == "backward"])
        times = _measure.interleaved(calls[direction], on_gpu=True, turns=turns)
        first = times["function"].seconds
        for name, time in times.items():
            row = {
                "case": f"{case.name} {dim} {n} {direction}",
                "name": name,
                "us": round(time.seconds * 1e6, 1),
                "times the function": round(time.seconds / first, 3),
                "error": errors[name],
            }
            print("  " + "  ".join(f"{value}" for value in row.values()), flush=True)
            yield row


def main():
    """Measure, print and write the report."""
    parser = timing.arguments(__doc__.splitlines()[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--passes", nargs="+", default=["forward", "backward"])
    everyone = ["function", "option", *PEERS]
    parser.add_argument("--names", nargs="+", default=everyone, choices=everyone)
    parser.add_argument("--row", help="of both tables; what is chosen, by default")
    args = parser.parse_args()
    xp, on_gpu = timing.backend(args)
    if not on_gpu:
        raise SystemExit("this benchmark needs a GPU")
    rows = []
    with pytest.MonkeyPatch.context() as patch:
        for operation in ("attention", "attention_vjp") if args.row else ():
            support_rows.force(patch, operation, args.row)
        for n, dim, case in itertools.product(args.lengths, args.dims, CASES):
            if args.only in f"{case.name} {dim} {n}":
                rows += measure(xp, case, dim, n, args.turns, args.passes, args.names)
                timing.save(args.json, "flex", on_gpu, rows=rows)


if __name__ == "__main__":
    main()
