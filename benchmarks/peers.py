"""Attention by others, as calls by name: torch's back ends and FlashAttention-4.

Each gets the arrays of a case in the layout that it likes best, made beforehand. What
a call returns has the shape of ours.
"""

import argparse
import contextlib
import functools
import os

import timing
from timing import to_torch

# How a peer is named in a report, and what of torch it is.
_BACK_ENDS = {
    "torch flash": "FLASH_ATTENTION",
    "torch cudnn": "CUDNN_ATTENTION",
    "torch efficient": "EFFICIENT_ATTENTION",
    "torch math": "MATH",
}
# FlashAttention-4, by the functions below its autograd ones: half the cost on the host.
FLASH4 = "flash-attn-4"
FLASH4_MODULE = "flash_attn.cute.interface"
NAMES = (*_BACK_ENDS, FLASH4)


def names(text):
    """Names of peers between commas, as --peers takes them."""
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    if unknown := [name for name in found if name not in NAMES]:
        raise argparse.ArgumentTypeError(
            f"no peer is named {', '.join(unknown)}; there are {', '.join(NAMES)}"
        )
    return found


def add_argument(parser):
    """--peers, of those who compute attention."""
    parser.add_argument(
        "--peers",
        type=names,
        default=NAMES,
        metavar="NAMES",
        help=f"only these, between commas, of {', '.join(NAMES)}",
    )


def forward(torch, flash4, case, q, k, v, only=NAMES):
    """Calls of those that are there, named in `only` and made for the case.

    Without a GPU torch has no back ends to choose from, and is always there.
    """
    calls = {}
    if torch is not None:
        calls |= _torch_forward(torch, case, q, k, v)
    if flash4 is not None and FLASH4 in only and _is_for_flash4(case):
        calls[FLASH4] = _flash4_forward(torch, flash4, case, q, k, v)
    return {name: call for name, call in calls.items() if name in (*only, "torch")}


def backward(torch, flash4, case, dout, q, k, v, only=NAMES):
    """The same for gradients: each call goes from dout to dq, dk and dv."""
    calls = {}
    if torch is not None:
        wanted = [name for name in _BACK_ENDS if name in only and name != "torch math"]
        calls |= _torch_backward(torch, case, dout, q, k, v, wanted)
    if flash4 is not None and FLASH4 in only and _is_for_flash4(case):
        calls[FLASH4] = _flash4_backward(torch, flash4, case, dout, q, k, v)
    return calls


# --- torch ---------------------------------------------------------------------------


def _torch_forward(torch, case, q, k, v):
    """scaled_dot_product_attention, each of its back ends by name."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    q, k, v = (to_torch(torch, x) for x in (q, k, v))
    # torch's causal mask is top-left; with one query it would see one key.
    if case.causal and case.seqlen_q != case.seqlen_k:
        return {}
    group = case.num_heads != case.num_kv_heads

    def call(name=None):
        chosen = _back_end(torch, name) if name else contextlib.nullcontext()
        with chosen, torch.no_grad():
            return sdpa(q, k, v, is_causal=case.causal, enable_gqa=group)

    if not q.is_cuda:
        return {"torch": call}
    return {name: functools.partial(call, name) for name in _BACK_ENDS}


def _back_end(torch, name):
    """In this context torch takes no other."""
    attention = torch.nn.attention
    return attention.sdpa_kernel(getattr(attention.SDPBackend, _BACK_ENDS[name]))


def _torch_backward(torch, case, dout, q, k, v, wanted):
    """The backward of scaled_dot_product_attention, each back end by name."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    dout, *inputs = (to_torch(torch, x) for x in (dout, q, k, v))
    inputs = [x.requires_grad_() for x in inputs]
    group = case.num_heads != case.num_kv_heads
    calls = {}
    for name in wanted:
        try:
            with _back_end(torch, name):
                out = sdpa(*inputs, is_causal=case.causal, enable_gqa=group)
        except RuntimeError:  # not for this dtype or size
            continue
        calls[name] = lambda out=out: torch.autograd.grad(
            out, inputs, dout, retain_graph=True
        )
    return calls


# --- FlashAttention-4 ----------------------------------------------------------------


def compile_flash4(calls, *args):
    """Call FlashAttention-4 once, by `forward` or `backward`, for its cache on disk.

    It compiles one kernel after another; processes that call it side by side do so
    many at a time. Without its cache what they compile would be lost.
    """
    if os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED") != "1":
        return
    torch, flash4 = timing.optional("torch"), timing.optional(FLASH4_MODULE)
    if torch is not None and flash4 is not None:
        for call in calls(torch, flash4, *args, only=(FLASH4,)).values():
            call()


def _is_for_flash4(case):
    """Whether it takes a case; on an older card than Hopper it is no peer."""
    return case.dtype in ("float16", "bfloat16") and not getattr(case, "card", "")


def _sequence_first(torch, *arrays):
    """Views of batch, sequence, head, column, as it is called."""
    return [to_torch(torch, x).transpose(1, 2) for x in arrays]


def _flash4_forward(torch, interface, case, q, k, v):
    q, k, v = _sequence_first(torch, q, k, v)

    def call():
        out, *_ = interface._flash_attn_fwd(q, k, v, causal=case.causal)
        return out.transpose(1, 2)

    return call


def _flash4_backward(torch, interface, case, dout, q, k, v):
    dout, q, k, v = _sequence_first(torch, dout, q, k, v)

    @functools.cache  # made by the first call, which is not timed
    def saved():
        out, lse, *_ = interface._flash_attn_fwd(
            q, k, v, causal=case.causal, return_lse=True
        )
        return out, lse

    def call():
        out, lse = saved()
        grads = interface._flash_attn_bwd(q, k, v, out, dout, lse, causal=case.causal)
        return tuple(x.transpose(1, 2) for x in grads[:3])

    return call
