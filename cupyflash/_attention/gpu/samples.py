"""Problems that cover everything that the attention tables may compile."""

import functools
import itertools
from dataclasses import replace

import numpy as np

from cupyflash._attention import functions
from cupyflash._attention.gpu.fp64 import forward as fp64_forward
from cupyflash._attention.problem import AttentionProblem, with_cuda
from cupyflash._core.dtypes import FLOATS, ITEMSIZE

_SWITCHES: dict[str, dict] = {
    "plain": {},
    "bias": {"bias": "float32"},
    "mask": {"mask": "bool"},
    "softcap": {"softcap": 30.0},
    "sinks": {"sinks": "float32"},
    "alibi": {"alibi_slopes": "float32"},
    "lengths": {"query_lengths": "int32", "key_lengths": "int64"},
    "offsets": {"query_offset": "array", "query_offsets": "int32"},
}
_ALL_OPTIONS = {
    name: value for case in _SWITCHES.values() for name, value in case.items()
}


# A mask beside one other option.
_BESIDE_MASKS: tuple[dict, ...] = (
    {"bias": "bfloat16", "terms": "tiles"},
    {"bias": "float32", "terms": "unit"},
    {"bias": "float32", "terms": "bias of keys"},
    {"alibi_slopes": "float32"},
    {"softcap": 30.0},
)


def made_up(dtype="float16", head_dim=64, batch=(1,), **options):
    """A problem large enough for the largest tiles."""
    return AttentionProblem(
        backend="cupy",
        batch=batch,
        num_heads=64,
        num_kv_heads=64,
        seqlen_q=4096,
        seqlen_k=4096,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype=dtype,
        scale=1.0,
        **options,
    )


def with_functions(problem, has_score=True):
    """The problem with a score and a mask function that read an array each."""

    def alibi(s, h, i, j, *, slopes):
        return s - slopes[h] * abs(i - j)

    def within(b, i, j, *, document, far=1024):
        return (document[b, j] == document[b, i]) & (i - j <= far)

    slopes, document = np.ones(1, np.float32), np.ones((1, 1), np.int32)
    score = functions.bound(alibi, {"slopes": slopes}) if has_score else None
    mask = functions.bound(within, {"document": document}, is_mask=True)
    problem = replace(
        problem,
        score=score and score.expression.key,
        mask_function=mask.expression.key,
    )
    return with_cuda(problem, functions.Functions(score, mask))


def with_gradients(problem):
    """The problem as the kernel for gradients of named arrays sees it."""

    def relative(s, b, h, i, j, *, table, weights, kinds):
        near = table[np.clip(i - j, -64, 64) + 64, h]
        return s * weights[kinds[b, i], kinds[b, j]] + near

    arrays = {
        "table": np.ones((1, 1), np.float32),
        "weights": np.ones((1, 1), np.float64),
        "kinds": np.ones((1, 1), np.int32),
    }
    score = functions.bound(relative, arrays)
    problem = replace(problem, score=score.expression.key)
    return with_cuda(problem, functions.Functions(score), ("table", "weights"))


def representative():
    """(problem, batch axes): each dtype, head dimension and switch at least once."""
    for dtype in FLOATS:
        yield made_up(dtype), 1
    for head_dim, dtype in itertools.product((128, 256, 512), ("float32", "float64")):
        yield made_up(dtype, head_dim), 1
    for head_dim in (128, 256):
        yield made_up("float32", head_dim, mask="bool"), 1
    for name, options in _SWITCHES.items():
        if name != "plain":
            yield made_up("float32", **options), 1
    yield made_up("bfloat16", bias="bfloat16"), 1
    yield made_up("float64", **_ALL_OPTIONS), 3
    for dtype, head_dim in itertools.product(("float32", "float64"), (64, 128, 256)):
        split = made_up(dtype, head_dim, keys_of_part=256, sinks=dtype)
        for seqlen_q in (8, 64, 512):
            yield replace(split, seqlen_q=seqlen_q), 2
    for dtype in ("bfloat16", "float32", "float64"):
        yield with_functions(made_up(dtype)), 1
        yield with_functions(made_up(dtype, 128, softcap=30.0)), 1
    for head_dim in (64, 128, 192, 256):
        tf32 = made_up("float32", head_dim, precision="tf32")
        yield tf32, 1
        yield replace(tf32, bias="float32", mask="bool"), 1
    for head_dim in (192, 256):
        wide = made_up("float32", head_dim)
        yield wide, 1
        yield replace(wide, right=0), 1
        yield replace(wide, bias="float32", mask="bool"), 1
        yield replace(wide, softcap=30.0, alibi_slopes="float32"), 1
        yield replace(wide, **_ALL_OPTIONS), 2
        yield replace(wide, **{**_ALL_OPTIONS, "softcap": 0.0}), 2
        yield with_functions(wide), 1
        asked = replace(made_up("float32", head_dim), num_heads=16, num_kv_heads=16)
        for options in ({}, {"right": 0}, {"bias": "float32"}, _ALL_OPTIONS):
            yield replace(asked, **options), 1
            yield replace(asked, **options, seqlen_q=64), 1
        yield with_functions(asked), 1
        yield replace(asked, head_dim_v=64), 1
        yield replace(asked, head_dim=64), 1
        yield replace(asked, seqlen_q=1 << 16, seqlen_k=1 << 16), 1
    yield from fp64_forward.representative(made_up)
    yield from _bounded()
    yield from _few()
    yield from _few_rows()
    yield from _few_rows_of_gradients()
    yield from _several()
    yield from _short()
    yield from _tiny()
    yield from _wide()
    yield from _long()


def _long():
    """Kernels with long sums (attention/simt/long_sums.cuh)."""
    long = {"seqlen_q": 1 << 16, "seqlen_k": 1 << 16}
    dims = (64, 128, 256, 512)
    for dtype, head_dim in itertools.product(("float32", "float64"), dims):
        yield replace(made_up(dtype, head_dim), **long), 1


def _few():
    """Many entries with few queries, and keys of their own."""
    for dtype, (queries, keys, head_dim) in itertools.product(
        FLOATS,
        (
            (1, 40, 64),
            (1, 300, 64),
            (1, 512, 128),
            (1, 1000, 32),
            (1, 20, 256),
            (2, 100, 64),
            (4, 70, 32),
        ),
    ):
        few = {"num_heads": 4096, "num_kv_heads": 4096}
        few |= {"seqlen_q": queries, "seqlen_k": keys}
        yield replace(made_up(dtype, head_dim), **few), 1
        if head_dim == 64:
            yield replace(made_up(dtype, head_dim), **few, **_ALL_OPTIONS), 2
            yield replace(made_up(dtype, head_dim, right=0), **few), 1
    tf32 = {"precision": "tf32", "num_heads": 4096, "num_kv_heads": 4096}
    yield replace(made_up("float32"), seqlen_q=1, seqlen_k=100, **tf32), 1
    two = {"num_heads": 4096, "num_kv_heads": 4096, "seqlen_q": 2, "seqlen_k": 40}
    for head_dim in (64, 256):
        yield replace(made_up("float64", head_dim), **two), 1
        yield replace(made_up("float64", head_dim), **two, **_ALL_OPTIONS), 2
    # Few entries with many keys, which blocks share.
    for dtype, (queries, head_dim) in itertools.product(
        FLOATS, ((1, 64), (4, 64), (1, 256))
    ):
        few = {"num_heads": 100, "num_kv_heads": 100, "seqlen_q": queries}
        yield replace(made_up(dtype, head_dim), **few), 1
        if head_dim == 64:
            yield replace(made_up(dtype, head_dim), **few, **_ALL_OPTIONS), 2

    # Rows that may start at any element.
    for dtype in FLOATS:
        itemsize = ITEMSIZE[dtype]
        anywhere = {"no_vectors": "q starts anywhere", "row_alignment": itemsize}
        for queries, heads in ((1, 4096), (2, 4096), (1, 100)):
            few = {"num_heads": heads, "num_kv_heads": heads, "seqlen_q": queries}
            few |= {"seqlen_k": 100 if heads > 100 else 4096, **anywhere}
            yield replace(made_up(dtype), **few), 1
            if queries == 1:
                yield replace(made_up(dtype), **few, **_ALL_OPTIONS), 2


def _few_rows():
    """Few queries of many keys in float32."""
    for head_dim in (64, 128, 192, 256):
        for queries in (16, 32):
            few = {"num_heads": 1024, "num_kv_heads": 1024, "seqlen_q": queries}
            asked = replace(made_up("float32", head_dim), **few)
            yield asked, 1
            yield replace(asked, bias="float32", mask="bool"), 1
            yield replace(asked, key_lengths="int32", right=0), 1
            yield replace(asked, softcap=30.0, alibi_slopes="float32"), 1
            yield replace(asked, **_ALL_OPTIONS), 2
            yield replace(asked, precision="tf32"), 1
            yield replace(asked, no_vectors="they start anywhere"), 1
            yield replace(asked, **_ALL_OPTIONS, no_vectors="they start anywhere"), 2
        yield replace(asked, batch=(4, 1), keys_of_part=256, sinks="float32"), 2


def _few_rows_of_gradients():
    """Few queries of many keys in 16 bits, of heads that are many, and few."""
    for head_dim, heads, queries in itertools.product(
        (32, 64, 192, 256), (1024, 100), (16, 32)
    ):
        few = {"num_heads": heads, "num_kv_heads": heads, "seqlen_q": queries}
        asked = replace(made_up("bfloat16", head_dim), **few)
        yield asked, 1
        if head_dim == 256:
            yield replace(asked, bias="float32", mask="bool"), 1
            yield replace(asked, key_lengths="int32", right=0), 1
            yield replace(asked, softcap=30.0, alibi_slopes="float32"), 1
        if head_dim in (64, 256):
            yield replace(asked, **_ALL_OPTIONS), 2
            yield replace(asked, dtype="float16"), 1
    few = {"num_heads": 1024, "num_kv_heads": 1024, "seqlen_q": 16}
    for dtype in ("float16", "bfloat16"):
        yield replace(made_up(dtype, 96), **few), 1


def _several():
    """Several float64 queries with keys of their own, which blocks share if few."""
    for head_dim, queries, heads in itertools.product(
        (32, 64, 96, 128, 192, 256), (8, 16), (4096, 100)
    ):
        several = {"num_heads": heads, "num_kv_heads": heads, "seqlen_q": queries}
        asked = replace(made_up("float64", head_dim), **several)
        yield asked, 1
        yield replace(asked, bias="float64", mask="bool"), 1
        yield replace(asked, key_lengths="int32", right=0), 1
        yield replace(asked, no_vectors="they start anywhere"), 1
        yield replace(asked, softcap=30.0, alibi_slopes="float64"), 1
        yield replace(asked, **_ALL_OPTIONS), 2


def _short():
    """Many entries with few queries and keys each, or with few keys."""
    for dtype, (queries, keys, head_dim) in itertools.product(
        ("float16", "bfloat16", "float32"),
        ((40, 40, 64), (16, 16, 32), (4, 4, 8), (1, 100, 64), (64, 64, 128)),
    ):
        few = {"num_heads": 512, "num_kv_heads": 512}
        few |= {"seqlen_q": queries, "seqlen_k": keys}
        yield replace(made_up(dtype, head_dim), **few), 1
        if (queries, dtype) in ((40, "bfloat16"), (40, "float32")):
            yield replace(made_up(dtype, head_dim), **few, **_ALL_OPTIONS), 2
            yield replace(made_up(dtype, head_dim, right=0), **few), 1
            yield replace(made_up(dtype, head_dim), **{**few, "num_heads": 2048}), 1
    tf32 = {"precision": "tf32", "num_heads": 512, "num_kv_heads": 512}
    yield replace(made_up("float32"), seqlen_q=40, seqlen_k=40, **tf32), 1
    # Few keys of many queries, which blocks share if heads are few.
    for heads in (4096, 32):
        few = {"num_heads": heads, "num_kv_heads": heads}
        many = {**few, "seqlen_q": 4096, "seqlen_k": 32 if heads > 32 else 16}
        for dtype, head_dim in itertools.product(
            ("bfloat16", "float32"), (64, 128, 256)
        ):
            yield replace(made_up(dtype, head_dim), **many), 1
        for dtype in ("bfloat16", "float32"):
            yield replace(made_up(dtype), **{**many, "seqlen_k": 1}), 1
            yield replace(made_up(dtype), **many, **_ALL_OPTIONS), 2
        yield replace(made_up("float32"), **{**many, "seqlen_k": 64}), 1
    # In float64.
    few = {"num_heads": 512, "num_kv_heads": 512}
    for keys, head_dim in itertools.product((16, 32, 64), (32, 64, 96, 128, 192, 256)):
        of_doubles = replace(made_up("float64", head_dim), **{**few, "seqlen_k": keys})
        yield of_doubles, 1
        if keys == 32:
            yield replace(of_doubles, **_ALL_OPTIONS), 2
            yield replace(of_doubles, softcap=30.0), 1
            yield with_functions(of_doubles), 1
        if head_dim == 64 or (keys, head_dim) == (32, 128):
            yield replace(of_doubles, seqlen_q=40), 1
    # And for the forward kernel.
    for keys, head_dim in itertools.product((8, 16, 32), (16, 64, 128, 192, 256)):
        of_doubles = replace(made_up("float64", head_dim), **{**few, "seqlen_k": keys})
        if keys == 8 or head_dim in (16, 192, 256):
            yield of_doubles, 1
            yield replace(of_doubles, bias="float64", softcap=30.0), 1
            yield replace(of_doubles, alibi_slopes="float64", sinks="float64"), 1
    # Warps share tiles of few queries.
    for keys, head_dim in ((32, 192), (32, 256), (64, 128)):
        of_doubles = replace(made_up("float64", head_dim), **{**few, "seqlen_k": keys})
        yield replace(of_doubles, seqlen_q=20), 1
        yield replace(of_doubles, seqlen_q=20, **_ALL_OPTIONS), 2
    few = {"num_heads": 2, "num_kv_heads": 2, "seqlen_q": 20, "seqlen_k": 32}
    for head_dim_v in (192, 256):  # and parts of tiles that are narrow
        yield replace(made_up("float64", 16), head_dim_v=head_dim_v, **few), 1


def _tiny():
    """The fewest queries and keys."""
    sizes = [(dtype, 4, 8) for dtype in FLOATS]
    for dtype in ("float16", "bfloat16", "float32"):
        sizes += [(dtype, 4, 16), (dtype, 8, 8)]
    for dtype, rows, head_dim in sizes:
        few = {"seqlen_q": rows, "seqlen_k": rows}
        yield replace(made_up(dtype, head_dim), **few), 1
        if (rows, head_dim) == (4, 8) and dtype != "float16":
            yield replace(made_up(dtype, head_dim), **few, **_ALL_OPTIONS), 2


def _wide():
    """16-bit heads above 256 columns."""
    for dtype, dims in (("bfloat16", (576, 512)), ("float16", (576, 576))):
        asked = replace(made_up(dtype, dims[0]), head_dim_v=dims[1])
        yield asked, 1
        yield replace(asked, batch=(4, 1), keys_of_part=256, sinks="float32"), 2
        yield replace(asked, **_ALL_OPTIONS), 2
        yield replace(asked, bias="float32", mask="bool"), 1
        yield replace(asked, query_lengths="int32", key_lengths="int32"), 1


def _bounded():
    """Kernels that depend on position bounds, at each head size."""
    for head_dim in (64, 96, 128, 192, 256):
        make = functools.partial(made_up, "bfloat16", head_dim)
        for bounds in ({}, {"right": 0}, {"left": 1024, "right": 0}):
            yield make(**bounds), 1
            yield make(key_lengths="int32", **bounds), 1
            both = {"query_lengths": "int32", "key_lengths": "int32"}
            yield make(**both, **bounds), 2
        for terms in ("keys", "unit", "any"):
            yield make(right=0, bias="float32", terms=terms), 1
            yield make(mask="bool", terms=terms), 1
        for options in ({}, {"right": 0}, {"key_lengths": "int32"}):
            yield make(bias="bfloat16", terms="tiles", **options), 1
        yield replace(make(bias="bfloat16", terms="tiles"), seqlen_q=40), 1
        for bounds in ({}, {"right": 0}, {"left": 1024, "right": 0}):
            for options in _BESIDE_MASKS:
                yield make(mask="bool", **options, **bounds), 1
        for terms in ({}, {"bias": "float32", "terms": "keys"}):
            capped = {"softcap": 30.0, **terms}
            yield make(**capped), 1
            yield make(left=1024, right=0, **capped), 1
        yield make(bias="float32", terms="keys"), 1
        yield make(right=0, alibi_slopes="float32"), 1
        yield make(left=1024, **_ALL_OPTIONS), 2
        few = {"seqlen_q": 1, "num_kv_heads": 16}
        yield replace(make((16,)), **few), 1
        yield replace(make(key_lengths="int32"), **few), 1
        yield replace(make(right=0), **few), 1
        few = {"num_heads": 2, "num_kv_heads": 2}
        yield replace(make(), **few), 1
        yield replace(make(right=0), **few), 1
    for head_dim in (33, 100, 250):  # rows that end inside a vector
        yield made_up("bfloat16", head_dim), 1
    yield made_up("float16", 128, alibi_slopes="float32"), 1
    yield with_functions(made_up("float16", 128), has_score=False), 1
    for bounds in ({}, {"right": 0}):
        yield replace(made_up("bfloat16", 192, **bounds), head_dim_v=128), 1
        for head_dim in (192, 256):
            yield replace(made_up("bfloat16", head_dim, **bounds), seqlen_q=8192), 1
        yield replace(made_up("float16", 64, **bounds), seqlen_k=1024), 1
        yield made_up("bfloat16", 128, left=255, **bounds), 1
        # Short sequences, a batch of two axes, and rows of any alignment.
        for head_dim in (64, 128, 256):
            asked = made_up("bfloat16", head_dim, **bounds)
            yield replace(asked, no_tensor_map="q starts anywhere"), 1
            yield replace(made_up("float16", head_dim, **bounds), seqlen_q=1024), 1
            keys = {"bias": "float32", "terms": "keys"}
            for more in ({}, {"left": 1024}, keys):
                asked = made_up("bfloat16", head_dim, **bounds, **more)
                yield replace(asked, seqlen_q=512), 2


def everything():
    """(problem, batch axes) over all dtypes, head dimensions and sets of switches."""
    head_dims = (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512)
    yield from representative()
    for dtype, head_dim in itertools.product(FLOATS, head_dims):
        yield made_up(dtype, head_dim), 1
    for count in range(2, len(_SWITCHES)):
        for names in itertools.combinations(list(_SWITCHES)[1:], count):
            options = {k: v for name in names for k, v in _SWITCHES[name].items()}
            yield made_up("float16", **options), 1
            yield made_up("float64", **options), 2
