"""The cells of the tables of attention: a group of them a line of the README's table.

Each is timed beside torch in the same turns; where torch has nothing like it, beside
our own call without what the cell is about.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from cupyflash._cli import bench_cases
from cupyflash._cli.bench_cases import AttentionCase
from cupyflash._cuda import device

# Tokens in sequences of n, heads of D columns, as many columns in all.
TOKENS, HIDDEN = 16384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# Fewer where torch holds the scores in memory.
_FEW_TOKENS = 8192


@dataclass(frozen=True)
class Cell(AttentionCase):
    """A case with a line of its own in a table."""

    group: str = ""
    head_dim_v: int = 0  # 0: head_dim
    precision: str = "float32"  # of float32
    softcap: float = 0.0
    key_bias: bool = False
    window: int = 0  # keys to the left, and none to the right
    card: str = ""  # the architecture whose kernels are taken; that of the device

    @property
    def work(self) -> float:
        """Operations of both products, over all that a causal mask shows."""
        columns = self.head_dim + (self.head_dim_v or self.head_dim)
        return super().work * columns / (2 * self.head_dim)

    @property
    def label(self) -> str:
        parts = [super().label]
        if self.head_dim_v:
            parts.append(f"{self.head_dim_v} columns of v")
        if self.dtype == "float32" and self.precision != "float32":
            parts.append(self.precision)
        if self.softcap:
            parts.append("softcap")
        if self.key_bias:
            parts.append("bias a key")
        if self.window:
            parts.append(f"window {self.window}")
        if self.card:
            parts.append(f"as on {self.card}")
        return ", ".join(parts)

    @property
    def beside(self) -> "Cell":
        """What one would pay without the option that the cell is about, or itself."""
        return replace(
            self,
            num_kv_heads=self.num_heads if self.seqlen_q > 1 else self.num_kv_heads,
            softcap=0.0,
            key_bias=False,
            window=0,
        )

    def inputs(self, xp) -> tuple[Any, Any, Any]:
        """q, k and v."""
        q, k, v = bench_cases.attention_inputs(xp, self)
        return q, k, v[..., : self.head_dim_v or None]

    def options(self, xp) -> dict[str, Any]:
        """What a call takes beside q, k, v and causal."""
        options: dict[str, Any] = {}
        if self.precision != "float32":
            options["precision"] = self.precision
        if self.softcap:
            options["softcap"] = self.softcap
        if self.key_bias:
            options["bias"] = bench_cases.random(xp, (self.seqlen_k,), "float32", 5)
        if self.window:
            options["window"] = (self.window - 1, 0)
        return options


@dataclass(frozen=True)
class GradientCell(Cell):
    """The gradients of a cell."""

    @property
    def work(self) -> float:
        """Operations of five matrix products where the forward call has two."""
        return 2.5 * super().work


@contextlib.contextmanager
def as_card(arch: str) -> Iterator[None]:
    """Choose kernels as a card of `arch` would; its kernels must run on the device."""
    if not arch:
        yield
        return
    from cupyflash._attention.gpu import backward as attention_vjp_gpu
    from cupyflash._attention.gpu import forward as attention_gpu
    from cupyflash._cuda import plan_cache, runtime

    modules = (attention_gpu, attention_vjp_gpu)
    device_of, plans = runtime.device, [module._plans for module in modules]
    here = device_of(0)
    older = replace(device.device_of_arch(arch), num_sms=here.num_sms, nvrtc=here.nvrtc)
    runtime.device = lambda device_id: older
    try:
        for module in modules:
            module._plans = plan_cache.PlanCache()
        yield
    finally:
        runtime.device = device_of
        for module, before in zip(modules, plans, strict=True):
            module._plans = before


def of_tokens(group, seqlen, head_dim, dtype="bfloat16", kind=Cell, **more):
    """A cell of as many tokens and columns as all others."""
    tokens = TOKENS if dtype in ("float16", "bfloat16") else _FEW_TOKENS
    batch, heads = tokens // seqlen, HIDDEN // head_dim
    sizes = (batch, heads, heads, seqlen, seqlen, head_dim)
    return kind(*sizes, dtype, **more, group=group)


def _grid(group, head_dims, lengths, dtype="bfloat16", **more):
    return [
        of_tokens(group.format(D=d), n, d, dtype, causal=causal, **more)
        for d in head_dims
        for causal in (False, True)
        for n in lengths
    ]


def _decoding(batch, seqlen):
    group = "one query, bfloat16, D = 128, 32 / 8 heads"
    return Cell(batch, 32, 8, 1, seqlen, 128, "bfloat16", group=group)


def _option(group, head_dim, seqlen=4096, **more):
    return of_tokens(f"{group}, bfloat16, D = {head_dim}", seqlen, head_dim, **more)


FORWARD = (
    *_grid("bfloat16, D = {D}", (64, 128, 256), LENGTHS),
    *_grid("float16, D = {D}", (64, 128, 256), (1024, 4096), "float16"),
    *_grid("bfloat16, D = {D}", (96, 192), (4096,)),
    *_grid("bfloat16, D = {D}, 128 columns of v", (192,), (4096,), head_dim_v=128),
    *(_option("softcap", d, softcap=30.0) for d in (64, 128, 256)),
    *(_option("bias a key", d, key_bias=True) for d in (64, 128, 256)),
    _option("window of 1024", 128, 16384, causal=True, window=1024),
    replace(_option("8 query heads a key head", 128, 8192), num_kv_heads=2),
    *(_decoding(*shape) for shape in ((1, 8192), (1, 131072), (16, 8192))),
    *_grid(
        "float16 by mma.sync, D = {D}", (64, 128, 256), LENGTHS, "float16", card="sm_80"
    ),
    *_grid("float32, D = {D}", (64, 128), (1024, 4096), "float32"),
    *_grid("tf32, D = {D}", (64, 128), (4096,), "float32", precision="tf32"),
    *_grid("float64, D = {D}", (64, 128, 192, 256), (4096,), "float64"),
)


def _gradients(group, *where, **more):
    return _grid(f"gradients{group}, D = {{D}}", *where, kind=GradientCell, **more)


BACKWARD = (
    *_gradients(", bfloat16", (64, 128, 256), LENGTHS),
    *_gradients(", float16", (64, 128, 256), (4096,), "float16"),
    *_gradients(
        " by mma.sync, bfloat16", (64, 128, 256), (512, 4096, 16384), card="sm_80"
    ),
    *_gradients(", float32", (64, 128), (4096,), "float32"),
    *_gradients(", float64", (64, 128), (4096,), "float64"),
)
