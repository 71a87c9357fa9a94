"""The launches of attention on sm_90a."""

from typing import Any

from cupyflash._attention.gpu import mask_bits
from cupyflash._attention.gpu.combine import combine_splits
from cupyflash._attention.gpu.config import OPTIONS_AND_OFFSET
from cupyflash._attention.gpu.plan import pack_params
from cupyflash._attention.gpu.sm90.forward import (
    HOPPER_BIAS_INPUTS,
    HOPPER_INPUTS,
    has_mask_bits,
    split_columns,
    split_states,
)
from cupyflash._attention.gpu.sm90.operands import encoder, q_encoder
from cupyflash._cuda.launch_sequence import Counter, Steps
from cupyflash._cuda.tensor_map import MappedInputs


def hopper_steps(row, problem, operands, device) -> Steps:
    """The Hopper kernel: tensor maps instead of pointers, work tiles from a counter."""
    params, batch_dims, fields = pack_params(problem, operands)
    tile = row.tile(problem, device)
    box_n = tile.box_n or tile.block_n
    encoders = {
        "q": q_encoder(problem, fields, operands.q, row.pack(problem)),
        "k": encoder(problem, fields, "k", operands.k, box_n),
        "v": encoder(problem, fields, "v", operands.v, box_n),
    }
    struct = HOPPER_INPUTS
    if row.has_bias_tiles(problem):
        struct = HOPPER_BIAS_INPUTS
        encoders["bias"] = encoder(problem, fields, "bias", operands.bias, tile.block_m)
    schedule = row.schedule(problem, device)

    def pack(maps, pointers):
        """The parameter of the kernel that depends on the addresses of q, k and v."""
        own = {**schedule, **dict(zip("qkv", pointers, strict=False)), **maps}
        return struct.pack(own)

    inputs = MappedInputs(encoders, pack)
    combines = row.combines(problem, device)
    counter: Counter | int = 0
    if combines:
        counter = Counter(2 + device.num_sms // 2)
    elif row.is_dynamic(problem):
        counter = Counter()
    main = row.config(tile, problem, batch_dims, device)
    rest: tuple[Any, ...] = (*OPTIONS_AND_OFFSET, params)
    before, scratch = [], {}
    if problem.mask_function is not None:
        lists = row.tile_lists(problem, device)
        before.append(lists.step(problem, batch_dims, params))
        scratch[lists.name] = lists.num_bytes(problem)
        rest = lists.argument(problem), *rest
    if has_mask_bits(problem):
        bits = mask_bits.MaskBits.of(problem, fields, tile.block_n)
        before.append(bits.step())
        scratch[mask_bits.NAME] = bits.num_bytes
        rest = bits.argument(), *rest
    num_splits = schedule["num_splits"]
    if num_splits == 1:
        main_step = main, (inputs, "out", "lse", counter, *rest)
        return Steps([*before, main_step], scratch)
    results = ("out", "lse") if combines else ()
    launches = [
        *before,
        (main, (inputs, "split_out", "split_lse", counter, *results, *rest)),
    ]
    if not combines:
        states = split_states(problem, num_splits)
        columns = split_columns(problem)
        config, packed = combine_splits(problem, operands, states, "float32", columns)
        launches.append((config, ("split_out", "split_lse", "out", "lse", packed)))
    return Steps(launches, {**scratch, **row.split_bytes(problem, device)})
