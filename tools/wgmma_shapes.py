"""Print cuda_src/ptx/wgmma_shapes.cuh: one function a shape of wgmma.

Usage: wgmma_shapes.py > cuda_src/ptx/wgmma_shapes.cuh
"""

# Columns of the accumulator that kernels ask for (any multiple of 8 up to 256 exists).
COLUMNS = (32, 48, 64, 80, 96, 112, 128, 192, 256)
# Those with a B that lies MN-major beside an A in shared memory, or K-major beside one
# in registers.
OTHER_COLUMNS = (64,)
TYPES = {"half_t": "f16", "bfloat16_t": "bf16"}

HEADER = """\
// SPDX-License-Identifier: MIT
// PTX wgmma.mma_async (sm_90a), written by tools/wgmma_shapes.py: a row of 64, 16-bit
// inputs, float32 sums.
//
// wgmma_t<type, columns>::ss takes A and B from shared memory (both K-major),
// ::rs takes A from registers and B from shared memory (MN-major, as V lies),
// ::ss_mn both from shared memory (A K-major, B MN-major),
// ::rs_k A from registers and B from shared memory (K-major). With accumulate = 0 the
// old d does not count. Before: wgmma_fence(). After: wgmma_commit_group() and
// wgmma_wait_group(), before which neither d nor a may be touched.
#pragma once

#include "common/types.cuh"

namespace ptx {

template <typename T, int kColumns>
struct wgmma_t;
"""


def lines_of(words, width=80):
    """Words joined by blanks into lines of at most `width` characters."""
    line = ""
    for word in words:
        if line and len(line) + len(word) + 1 > width:
            yield line
            line = ""
        line = f"{line} {word}" if line else word
    yield line


def function(columns, elem, name):
    """One instruction: `name` is ss, rs, ss_mn or rs_k."""
    from_registers = name in ("rs", "rs_k")
    count = columns // 2
    a_type = "const unsigned (&a)[4]" if from_registers else "unsigned long long a"
    first_b = count + (4 if from_registers else 1)
    a = (
        "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
        if from_registers
        else f"%{count}"
    )
    # scale-a, scale-b, then which operands lie MN-major in shared memory.
    majors = {"ss": "0, 0", "rs": "1", "ss_mn": "0, 1", "rs_k": "0"}[name]
    d = ", ".join(f"%{i}" for i in range(count)).split(" ")
    inputs = [f'"r"(a[{i}]),' for i in range(4)] if from_registers else ['"l"(a),']
    inputs += ['"l"(b),', '"r"(accumulate)']
    outputs = [f'"+f"(d[{i}]),' for i in range(count)]
    outputs[-1] = outputs[-1][:-1]
    kind = f"m64n{columns}k16.f32.{elem}.{elem}"
    yield f"  static __device__ __forceinline__ void {name}(float (&d)[{count}],"
    yield f"      {a_type}, unsigned long long b, int accumulate) {{"
    yield "    asm volatile("
    yield f'        "{{.reg .pred p; setp.ne.b32 p, %{first_b + 1}, 0;"'
    yield f'        "wgmma.mma_async.sync.aligned.{kind} {{"'
    for line in lines_of(d, 70):
        yield f'        "{line}"'
    yield f'        "}}, {a}, %{first_b}, p, 1, 1, {majors};}}"'
    for sign, words in ((":", outputs), (":", inputs)):
        for number, line in enumerate(lines_of(words, 72)):
            yield f"        {sign if number == 0 else ' '} {line}"
    yield "    );"
    yield "  }"


def main():
    """Print the header."""
    print(HEADER)
    print("// clang-format off")
    for columns in COLUMNS:
        for name, elem in TYPES.items():
            print("template <>")
            print(f"struct wgmma_t<{name}, {columns}> {{")
            for kind in ("ss", "rs") + ("ss_mn", "rs_k") * (columns in OTHER_COLUMNS):
                for line in function(columns, elem, kind):
                    print(line)
            print("};")
    print("// clang-format on")
    print("\n}  // namespace ptx")


if __name__ == "__main__":
    main()
