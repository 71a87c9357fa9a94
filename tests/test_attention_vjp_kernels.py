"""Plans of the gradient kernels, without a GPU: each term is added once, in its place.

The entries and axes that a plan hands to its kernels are gone through on the host.
"""

import itertools
import math

import numpy as np
import pytest

from cupyflash import _attention_vjp_kernels as kernels
from cupyflash import _attention_vjp_layout, _attention_vjp_problem, _kernels

CASES = {
    "plain": ((2, 4, 9, 8), (2, 4, 11, 8), None, None),
    "groups": ((2, 6, 9, 8), (2, 2, 11, 8), None, None),
    "matrices": ((9, 8), (11, 8), None, (9, 11)),
    "shared keys": ((5, 4, 300, 8), (1, 2, 11, 8), None, (11,)),
    "shared values": ((5, 4, 9, 8), (5, 2, 11, 8), (2, 11, 6), (4, 1, 1)),
    "shared queries": ((4, 9, 8), (3, 5, 2, 11, 8), None, (5, 1, 9, 1)),
    "crossed": ((1, 3, 4, 9, 8), (2, 1, 2, 11, 8), (2, 3, 2, 11, 6), (3, 4, 9, 11)),
    "middle axis": ((2, 3, 2, 4, 9, 8), (2, 1, 2, 1, 11, 8), None, (1, 1, 1, 4, 9, 1)),
    "few blocks": ((40, 8, 300, 8), (1, 1, 11, 8), None, (1, 1)),
    "few blocks of a bias": ((6, 8, 2000, 8), (6, 8, 2000, 8), None, (2000,)),
    "one row": ((3, 4, 1, 8), (3, 4, 50, 8), None, (50,)),
    "one key": ((3, 4, 50, 8), (3, 4, 1, 8), None, ()),
}


def offsets(axes):
    """Of all indices along `axes`: an array (indices, arrays)."""
    ranges = [range(n) for n in axes["size"]]
    places = np.array(list(itertools.product(*ranges)), np.int64)
    return places @ axes["stride"].T


def make_plan(q, k, v, bias):
    """(problem, plan) on a made-up device."""
    from cupyflash import _attention_vjp_plans

    q, k, v = (np.zeros(s, np.float16) for s in (q, k, v or k))
    bias = None if bias is None else np.zeros(bias, np.float32)
    sinks = np.zeros(q.shape[-3] if q.ndim > 2 else 1)
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    out = np.zeros((*batch, *q.shape[-3:-1], v.shape[-1]), np.float16)
    lse = np.zeros(out.shape[:-1], np.float32)
    problem, operands = _attention_vjp_problem.attention_vjp(
        out, q, k, v, out, lse, bias, None, None, False, None, None, 0.0, sinks, None,
        None, None, "bhsd", "float32", "auto", None, bias is not None, True, False,
    )  # fmt: skip
    device = _kernels.device_of_arch("sm_90a")
    row = kernels.REPAIRING
    return problem, _attention_vjp_plans.Plan(row, problem, operands, device, 0)


def captured(monkeypatch, module):
    """A list that gets every struct that is packed."""
    packed = []
    original = module.pack

    def pack(fields, dtype):
        result = np.zeros(1, dtype)
        for name, value in fields.items():
            result[name] = value
        packed.append(result[0])
        return original(fields, dtype)

    monkeypatch.setattr(module, "pack", pack)
    return packed


@pytest.mark.parametrize("case", CASES)
def test_every_entry_is_summed_once(case, monkeypatch):
    pytest.importorskip("cupy")
    from cupyflash import _gpu

    packed = captured(monkeypatch, _gpu)
    q, k, v, bias = CASES[case]
    problem, made = make_plan(q, k, v, bias)
    forward = problem.forward
    num_entries = math.prod(forward.batch) * forward.num_heads
    parts = iter([p for p in packed if "kept" in p.dtype.names and p["num_kept"]])
    sums = iter([p for p in packed if "num_terms" in p.dtype.names])
    views = _attention_vjp_layout._gradient_views(problem)
    # Sums of a part are packed before it.
    for part in made.parts:
        grads = next(parts)
        kept, summed = offsets(grads["kept"]), offsets(grads["summed"])[:, 0]
        assert len(kept) == grads["num_kept"]
        assert len(summed) == grads["num_summed"]
        entries = kept[:, :1] + summed
        assert sorted(entries.ravel()) == list(range(num_entries))
        for number, name in enumerate(part.names):
            places = [kept[:, 1 + number]]
            if part.terms is not None:
                (shape, _), add = part.terms[number], next(sums)
                moved = offsets(add["sums"]), offsets(add["terms"])[:, 0]
                terms = (moved[0][:, :1] + moved[1]).ravel()
                assert sorted(terms) == list(range(math.prod(shape)))
                to_out = np.empty(math.prod(shape), np.int64)
                to_out[terms] = np.repeat(moved[0][:, 1], len(moved[1]))
                places = [to_out[places[0]]]
            # Where each entry's gradient begins, against NumPy's own broadcasting.
            view = views[name]
            flat = np.arange(math.prod(view.shape)).reshape(view.shape)
            heads = (
                np.repeat(flat, forward.num_heads // flat.shape[len(forward.batch)], -3)
                if flat.shape[-3]
                else flat
            )
            first = np.broadcast_to(
                heads[..., 0, 0], (*forward.batch, forward.num_heads)
            ).ravel()
            np.testing.assert_array_equal(
                first[entries], np.broadcast_to(places[0][:, None], entries.shape)
            )
    assert next(parts, None) is None
