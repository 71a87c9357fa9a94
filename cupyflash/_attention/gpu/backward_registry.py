"""The table of gradient kernels of attention, best first."""

from cupyflash._attention.gpu.fp64.backward import TILED_F64_VJP
from cupyflash._attention.gpu.fp64.few_backward import FEW_F64_VJP
from cupyflash._attention.gpu.fp64.sections_backward import SECTIONS_F64_VJP
from cupyflash._attention.gpu.fp64.short_backward import SHORT_F64_VJP
from cupyflash._attention.gpu.simt.backward import TILED_VJP
from cupyflash._attention.gpu.simt.gemv_backward import GEMV_VJP
from cupyflash._attention.gpu.simt.tiny_backward import TINY_VJP
from cupyflash._attention.gpu.sm80.backward import MMA_VJP
from cupyflash._attention.gpu.sm80.backward_fp32 import MMA_SPLIT_VJP
from cupyflash._attention.gpu.sm80.few_backward import MMA_FEW_VJP
from cupyflash._attention.gpu.sm80.short_backward import MMA_SHORT_VJP
from cupyflash._attention.gpu.sm90.backward import HOPPER_VJP
from cupyflash._attention.gpu.sm90.backward_wide import HOPPER_WIDE_VJP

ATTENTION_VJP_KERNELS = (  # best first
    FEW_F64_VJP,
    MMA_FEW_VJP,
    GEMV_VJP,
    TINY_VJP,
    MMA_SHORT_VJP,
    HOPPER_VJP,
    HOPPER_WIDE_VJP,
    MMA_VJP,
    MMA_SPLIT_VJP,
    SHORT_F64_VJP,
    SECTIONS_F64_VJP,
    TILED_F64_VJP,
    TILED_VJP,
)
