"""The table of attention kernels, best first."""

from cupyflash._attention.gpu.fp64 import forward as fp64_forward
from cupyflash._attention.gpu.fp64.short_forward import SHORT_F64
from cupyflash._attention.gpu.simt.forward import NAIVE, ONLINE, SAFE, TILED
from cupyflash._attention.gpu.simt.gemv_forward import GEMV
from cupyflash._attention.gpu.simt.tiny_forward import TINY
from cupyflash._attention.gpu.sm80.few_forward import MMA_FEW
from cupyflash._attention.gpu.sm80.forward import MMA
from cupyflash._attention.gpu.sm80.short_forward import MMA_SHORT
from cupyflash._attention.gpu.sm90.forward import HOPPER
from cupyflash._attention.gpu.sm90.forward_wide import HOPPER_WIDE

ATTENTION_KERNELS = (  # best first
    GEMV,
    TINY,
    MMA_SHORT,
    HOPPER,
    MMA_FEW,
    MMA,
    HOPPER_WIDE,
    SHORT_F64,
    fp64_forward.TILED_F64,
    TILED,
    ONLINE,
    SAFE,
    NAIVE,
)
