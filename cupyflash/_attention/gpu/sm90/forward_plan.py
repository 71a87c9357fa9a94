"""The launches of attention on sm_90a."""

from typing import Any

from cupyflash._attention.gpu.config import OPTIONS_AND_OFFSET
from cupyflash._attention.gpu.functions import without_functions
from cupyflash._attention.gpu.plan import pack_params
from cupyflash._attention.gpu.sm90.forward import HOPPER_INPUTS
from cupyflash._attention.gpu.sm90.operands import encoder, q_encoder
from cupyflash._cuda.launch_sequence import Counter, Steps
from cupyflash._cuda.tensor_map import MappedInputs


def hopper_steps(row, problem, operands, device) -> Steps:
    """The Hopper kernel: tensor maps instead of pointers, work tiles from a counter."""
    params, batch_dims, fields = pack_params(problem, operands)
    tile = row.tile(problem)
    box_n = tile.box_n or tile.block_n
    encoders = {
        "q": q_encoder(problem, fields, operands.q, row.pack(problem)),
        "k": encoder(problem, fields, "k", operands.k, box_n),
        "v": encoder(problem, fields, "v", operands.v, box_n),
    }
    schedule = row.schedule(problem, device)

    def pack(maps, pointers):
        """The parameter of the kernel that depends on the addresses of q, k and v."""
        own = {**schedule, **dict(zip("qkv", pointers, strict=True)), **maps}
        return HOPPER_INPUTS.pack(own)

    inputs = MappedInputs(encoders, pack)
    combines = row.combines(problem, device)
    counter: Counter | int = 0
    if combines:
        counter = Counter(2 + device.num_sms // 2)
    elif row.is_dynamic(problem):
        counter = Counter()
    main, *combine = row.configs(problem, batch_dims, device)
    rest: tuple[Any, ...] = (*OPTIONS_AND_OFFSET, params)
    before, scratch = [], {}
    if problem.mask_function is not None:
        lists = row.tile_lists(problem)
        before.append(lists.step(problem, batch_dims, params))
        scratch[lists.name] = lists.num_bytes(problem)
        rest = lists.argument(problem), *rest
    num_splits = schedule["num_splits"]
    if num_splits == 1:
        main_step = main, (inputs, "out", "lse", counter, *rest)
        return Steps([*before, main_step], scratch)
    results = ("out", "lse") if combines else ()
    plain = without_functions(params)
    return Steps(
        [
            *before,
            (main, (inputs, "split_out", "split_lse", counter, *results, *rest)),
            *(
                (config, ("split_out", "split_lse", "out", "lse", num_splits, plain))
                for config in combine
            ),
        ],
        {**scratch, **row.split_bytes(problem, device)},
    )
