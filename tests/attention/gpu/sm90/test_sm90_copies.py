"""How often kernels hold the same code: the time to compile them follows their size."""

import pytest
import test_sm90_backward
import test_sm90_forward
from test_sm90_backward_wide import ROW as WIDE
from test_sm90_forward import HOPPER, ROW

from cupyflash._cli import nvrtc
from cupyflash._cuda import source

OPTIONS = {
    "bias": "bfloat16",
    "terms": "tiles",
    "mask": "bool",
    "alibi_slopes": "float32",
    "softcap": 3.0,
}
BOUNDS = [{"right": 0}, {"left": 9}, {"left": 9, "right": 9}]


def products(variant, columns):
    """How many wgmma of so many columns are in a kernel's text."""
    if why := nvrtc.unusable():
        pytest.skip(why)
    from cupy_backends.cuda.libs import nvrtc as library

    text = variant.prelude + source.load(variant.source, variant.generated)
    program = library.createProgram(text, variant.source, (), ())
    try:
        library.compileProgram(
            program,
            (
                "-std=c++17",
                "-arch=compute_90a",
                "--device-as-default-execution-space",
                "-ftz=true",
            ),
        )
        made = library.getPTX(program)
    finally:
        library.destroyProgram(program)
    made = made if isinstance(made, str) else made.decode()
    return made.count(f".m64n{columns}k16.")


@pytest.mark.parametrize("bounds", BOUNDS)
def test_masked_tiles_share_one_step(bounds):
    """The first tile of keys, those that are masked before and behind whole ones."""
    asked = test_sm90_forward.problem(head_dim=64, **OPTIONS, **bounds)
    (config, *_) = ROW.configs(asked, 1, HOPPER)
    tile = ROW.tile(asked, HOPPER)
    assert tile.block_n != 64
    of_a_tile = 64 // 16
    assert products(config.variant, tile.block_n) == 2 * of_a_tile


def test_both_gradients_of_wide_heads_share_the_last_product():
    asked = test_sm90_backward.problem(head_dim=256)
    variant = WIDE.config("_wide_keys", asked.forward, 1, 1).variant
    of_a_block = 64 // 16
    assert products(variant, 256) == 3 * of_a_block
