"""What there is to compile for the softmax family."""

from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import Variant
from cupyflash._softmax.gpu import samples as _samples
from cupyflash._softmax.gpu import transpose
from cupyflash._softmax.gpu.registry import KERNELS


def compile_list(device: Device, everything: bool) -> list[tuple[str, Variant]]:
    """Names of rows and what they compile for `device`: all of it, or a sample."""
    found: dict[tuple[str, Variant], None] = {}
    samples_of = _samples.everything if everything else _samples.representative
    for row in KERNELS:
        for problem in samples_of(row):
            for config in row.configs(problem, device):
                found[row.name, config.variant] = None
    return [*found, *transpose.compile_list()]
