"""One small call of each row of every table, for compute-sanitizer.

    python tests/record/sanitize.py --record    # all tools over all rows
    python tests/record/sanitize.py --record --tool memcheck attention/hopper
    python tests/record/sanitize.py --record --seconds 550 --jobs 16
    compute-sanitizer --tool racecheck python tests/record/sanitize.py softmax
    compute-sanitizer --tool memcheck python tests/record/sanitize.py --tiers softmax

Arguments name operations, or rows as "attention/tiled"; none is all of them. With
--tiers they name functions of the softmax family, and each of their tiers is called.
Results are checked too, and the exit code is 1 when one is wrong. --record writes what
the tools found into tests/record/gpu_record.json, with what they say where they cannot
judge a kernel.
"""

import argparse
import dataclasses
import math
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SOFTMAX_KINDS = (
    "rows", "columns", "short rows", "long columns", "long rows", "longer rows",
    "longest rows", "longest rows of doubles", "many columns", "short whole rows",
    "shortest rows", "one element",
)  # fmt: skip
# Elements of an array: a sanitizer makes kernels slower by a factor of up to 100.
_MOST = 1 << 21
# Plain calls of attention; and one each with all options, with parts of the keys, which
# are merged, with copies into rows of whole vectors, and with parts in odd numbers, or
# without a key, or beyond a window.
_PLAIN = (
    "plain", "options", "one query", "many keys", "odd heads", "odd parts",
    "odd, many keys", "empty parts",
)  # fmt: skip
# Calls with numbers that are not finite, where no query looks, and where one does:
# kernels that are careful, or make gradients again, run for these alone.
_NOT_FINITE = ("hidden", "seen")
# Of rows that take no plain ones.
_WIDE = ("wide heads", "wider heads", "wider options", "wider, many keys")
_SHORT = (
    "short", "short options", "short odd", "few keys", "few keys odd", "few keys wide",
)  # fmt: skip
_TINY = ("tiny", "tiny options", "tiniest options", "tiny odd")
_FEW = ("few queries", "few rows", "few options", "few rows options")
_SEVERAL = ("several queries", "several options")
_KINDS = (*SOFTMAX_KINDS, *_PLAIN, *_WIDE, *_SHORT, *_TINY, *_FEW, *_SEVERAL)
# An option alone, or a function: hopper, hopper_wide and mma have kernels for those.
_ALONE = (
    *("alibi", "causal alibi", "mask array"),
    *("mask function", "score function", "both functions"),
)
# q, k and v of such calls of a row that takes plain ones: with as many columns as
# gradients of hopper have kernels for them.
_WIDER = ((2, 4, 130, 128), (2, 2, 200, 128), (2, 2, 200, 128))
# What stands in for the plain calls of a row: the first of these that it takes.
_FIRST_KINDS = (
    _PLAIN[:1], _WIDE[:2], _SHORT[:1], ("few keys",), _TINY[:1], _FEW[:1], _FEW[1:2],
    _SEVERAL[:1],
)  # fmt: skip
# Kernels beside the tables, and rows whose pieces lie apart.
_MERGE, _TURN, _PIECES = "attention/merge", "softmax/turn", "softmax/pieces"
_TEAMS = "softmax/teams"  # tall columns, whose blocks lie anywhere on the card
_SINKS = "attention_vjp/sinks"  # with nearly all the weight
_SECONDS = 120  # that a tool may take for one row
# racecheck follows arrivals at an mbarrier, each of the lane that comes. It follows
# neither bar.arrive nor a lane that arrives for its warp behind __syncwarp(). Kernels
# that have those are compiled for it so that each lane arrives at an mbarrier, which
# orders the same; the macro is theirs.
_EACH_LANE_ARRIVES = "EACH_LANE_ARRIVES"
_FOLLOWED_BY_LANES = {
    "attention/tiled_f64", "attention/hopper", "attention_vjp/hopper",
    "attention_vjp/hopper_wide", "attention_vjp/mma", "attention_vjp/tiled",
    "attention_vjp/mma_few",
}  # fmt: skip


# --- calls ---------------------------------------------------------------------------


def groups():
    """Names of what a tool runs over in one process: a row, or one of softmax."""
    import rows

    return [f"{operation}/{name}" for operation, name in rows.all_rows()] + [*_BESIDE]


def cases_of(group):
    """Few cases of a row: each tier of softmax, types of two widths, all options."""
    import rows

    if group in _BESIDE:
        return ["float16"] if group == _SINKS else ["float32", "bfloat16"]
    operation, name = group.split("/")
    found = [case for case in rows.cases(operation, name) if case.kind in _KINDS]
    if operation == "softmax":  # each tier of memory
        one_of_each = {case.kind: case for case in reversed(found)}
        return list(one_of_each.values())[::-1]
    by_kind = ([case for case in found if case.kind in kinds] for kinds in _FIRST_KINDS)
    plain = next((cases for cases in by_kind if cases), [])
    kinds = _PLAIN[1:]
    if plain and plain[0].kind != "plain":
        kinds = (*kinds, *_WIDE[2:], *_SHORT[1:], *_TINY[1:], *_FEW[1:], *_SEVERAL[1:])
    kept = [c for c in plain if c.dtype in ("bfloat16", "float32", "float64")]
    more = [next((c for c in found if c.kind == k), None) for k in kinds]
    kept = (kept or plain)[:2]
    taken = [case for first in kept[:1] for case in alone(operation, name, first)]
    return kept + [case for case in more if case and case not in kept] + taken


@dataclasses.dataclass(frozen=True)
class Alone:
    """A call of a row with an option alone; gradients are summed in any order."""

    operation: str
    row: str
    dtype: str
    method: str
    shapes: tuple  # of q, k and v
    option: str  # of _ALONE, or "any order"

    def __str__(self):
        return f"{self.row}-{self.option}-{self.dtype}".replace(" ", "_")

    def options(self):
        """Arguments of the call beside q, k and v."""
        import numpy as np

        from cupyflash import scores

        if self.option == "any order":
            return {}
        if self.option == "mask array":
            (*_, queries, _), (*_, keys, _), _ = self.shapes
            return {"mask": np.random.default_rng(0).random((queries, keys)) < 0.7}
        if self.option.endswith("alibi"):
            _, heads, _, _ = self.shapes[0]
            slopes = np.arange(heads, dtype=np.float32) / 50
            causal = {"causal": True} if self.option == "causal alibi" else {}
            return {"alibi_slopes": slopes, **causal}
        score = {"score": lambda s, i, j: s * np.cos(s) - 0.01 * abs(i - j)}
        mask = {"mask": scores.sliding_window(60)}
        return {
            "score function": score,
            "mask function": mask,
            "both functions": score | mask,
        }[self.option]

    def is_taken(self):
        """Whether the row takes it on an H100."""
        import rows

        from cupyflash._cuda import device

        asked = rows.library_problem(
            self.operation, self.operation, self.shapes, self.dtype, self.method,
            self.options(),
        )  # fmt: skip
        if self.operation == "attention_vjp":
            asked = dataclasses.replace(asked, deterministic=False)
        row = rows.row_of(self.operation, self.row)
        return row.unsupported_reason(asked, device.device_of_arch("sm_90a")) is None

    def check(self, cupy):
        """Do the call, and compare it with NumPy's in float64."""
        import functions_gpu
        import numpy as np
        from accuracy import dtype_of, wide

        rng = np.random.default_rng(0)
        given = [rng.normal(size=s).astype(dtype_of(self.dtype)) for s in self.shapes]
        options, grads = self.options(), self.operation == "attention_vjp"
        method = {} if grads else {"method": self.method}
        found = functions_gpu.run(cupy, *given, options, grads, method)
        exact = functions_gpu.run(
            np, *(wide(x, np.float64) for x in given), options, grads
        )
        plain = functions_gpu.run(np, *given, options, grads)
        errors = functions_gpu.worst(found, exact, plain, self.dtype)
        assert max(errors) <= 2, errors


def alone(operation, row, case):
    """A call of a row with each option of `_ALONE` that it takes."""
    import rows

    own = case.kind in _WIDE + _SHORT + _TINY
    shapes = rows.ATTENTION_SHAPES[case.kind] if own else _WIDER
    for option in ("any order",) * (operation == "attention_vjp") + _ALONE:
        call = Alone(operation, row, case.dtype, case.method, shapes, option)
        if call.is_taken():
            yield call


def run_rows(cupy, wanted):
    """Call each row that is wanted, forced; the number of wrong results."""
    import pytest
    import rows

    failures = 0
    for group in groups():
        if wanted and not {group, group.split("/")[0]} & {*wanted}:
            continue
        for case in cases_of(group):
            with pytest.MonkeyPatch.context() as patch:
                try:
                    if group in _BESIDE:
                        _BESIDE[group](cupy, case)
                    else:
                        rows.force(patch, *group.split("/"))
                        _check(cupy, case)
                    verdict = "agrees"
                except NotImplementedError as unsupported_reason:
                    verdict = (
                        f"REFUSED {str(unsupported_reason).splitlines()[-1].strip()}"
                    )
                except AssertionError as error:
                    verdict, failures = f"WRONG {error}", failures + 1
            print(f"{group}: {case}: {verdict}", flush=True)
    return failures


def _check(cupy, case):
    """Compare the calls of a case, with its row forced."""
    import rows

    if isinstance(case, Alone):
        case.check(cupy)
        return
    for problem in problems_of(case):
        rows.check(cupy, problem)


def problems_of(case):
    """The small problem of a case; of a plain one of attention, not finite ones too."""
    import numpy as np
    import rows

    yield _small(rows.problem_of(case, np.random.default_rng(0)))
    if case.operation == "softmax" or case.kind not in sum(_FIRST_KINDS, ()):
        return
    for form in _NOT_FINITE:
        if case.method == "naive" and form == "seen":
            continue  # its lse is the formula's
        rng = np.random.default_rng(0)
        problem = rows.problem_of(case, rng)
        if form == "hidden":
            # A band: the first keys and the last queries see nothing of each other.
            problem.options |= {"causal": True, "window": (30, None)}
            problem.options["query_offset"] = 20
            rows.poison(problem, rng)
        else:
            problem.arrays["q"][..., -1, 3] = np.nan
        yield problem


def check_merge(xp, dtype):
    """Three parts of attention, merged."""
    import numpy as np
    import oracle
    from accuracy import BOUNDS, dtype_of, to_host, wide
    from placing import place

    import cupyflash

    rng = np.random.default_rng(0)
    outs = rng.normal(size=(3, 2, 70, 33)).astype(dtype_of(dtype))
    lses = rng.normal(size=(3, 2, 70)).astype(np.float32)
    lses[1, 0] = -np.inf
    out, lse = cupyflash.merge_attention_states(place(xp, outs), place(xp, lses))
    exact, exact_lse = oracle.merge(outs, lses)
    bound = BOUNDS["attention"][dtype] * float(np.abs(exact).max())
    np.testing.assert_allclose(wide(out).astype(float), exact.astype(float), 0, bound)
    np.testing.assert_allclose(to_host(lse), exact_lse.astype(float), 1e-6, 1e-6)


def check_turn(xp, dtype):
    """A result whose neighbours are those of another axis."""
    _check_softmax(xp, dtype, (300, 260), 1, _in_turned_memory)


def _in_turned_memory(x):
    """New memory for an array like `x`, column by column."""
    return type(x)(x.shape[::-1], x.dtype).T


def check_pieces(xp, dtype):
    """Rows over two axes that do not merge."""
    _check_softmax(xp, dtype, (6, 5, 64), (0, 2), lambda x: type(x)(x.shape, x.dtype))


def check_teams(xp, dtype):
    """Columns that no cluster holds, and their gradients."""
    import numpy as np
    import oracle
    from accuracy import BOUNDS, dtype_of, wide
    from placing import place

    import cupyflash

    shape = (40_001, 16)
    _check_softmax(xp, dtype, shape, 0, lambda x: type(x)(x.shape, x.dtype))
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(size=shape) for _ in range(2))
    y, dy = (v.astype(dtype_of(dtype)) for v in (oracle.softmax(x, 0), dy))
    placed = place(xp, y), place(xp, dy)
    assert "TEAMS=1" in str(cupyflash.explain("softmax", placed[0], 0))
    assert "TEAMS=1" in str(cupyflash.explain("softmax_vjp", *placed, 0))
    found, exact = cupyflash.softmax_vjp(*placed, 0), oracle.softmax_vjp(y, dy, 0)
    # Terms may cancel, which leaves the rounding of the sums.
    bound = BOUNDS["softmax"][dtype] * np.abs(exact) + 1e-5 * wide(y)
    assert (np.abs(wide(found) - exact) <= bound).all()


def check_sinks(xp, dtype):
    """Gradients of sinks beside which a float16 `out` is 0, by portable kernels."""
    import numpy as np
    import pytest
    import rows
    from accuracy import dtype_of, to_host, wide
    from placing import place

    import cupyflash

    rng = np.random.default_rng(0)
    given = [rng.normal(size=(2, 2, 70, 64)).astype(dtype_of(dtype)) for _ in "qkvo"]
    call = {"sinks": np.float32([24, 30]), "mask": rng.random((70, 70)) < 0.7}
    call["mask"][3:9] = False

    def dsinks(xp, convert):
        *on, dout = (convert(x) for x in given)
        options = {name: place(xp, x) for name, x in call.items()}
        out, lse = cupyflash.attention(*on, **options, return_lse=True)
        grads = cupyflash.attention_vjp(
            dout, *on, out, lse, need_dsinks=True, **options
        )
        return to_host(grads.dsinks)

    with pytest.MonkeyPatch.context() as patch:
        if xp is not np:
            rows.force(patch, "attention_vjp", "tiled")
        found = dsinks(xp, lambda x: place(xp, x))
    np.testing.assert_allclose(found, dsinks(np, lambda x: wide(x, np.float64)), 1e-4)


def _check_softmax(xp, dtype, shape, axis, empty):
    import numpy as np
    import oracle
    from accuracy import BOUNDS, dtype_of, relative_error, to_host
    from placing import place

    import cupyflash

    x = np.random.default_rng(0).normal(size=shape).astype(dtype_of(dtype))
    placed = place(xp, x)
    out = empty(placed)
    cupyflash.softmax(placed, axis, out=out)
    error = relative_error(to_host(out), oracle.softmax(x, axis), dtype)
    assert error <= BOUNDS["softmax"][dtype]


_BESIDE = {
    _MERGE: check_merge,
    _TURN: check_turn,
    _PIECES: check_pieces,
    _TEAMS: check_teams,
    _SINKS: check_sinks,
}


def let_each_lane_arrive():
    """Compile kernels that know of it so that racecheck follows them, from now on."""
    from cupyflash._cuda import source

    load = source.load

    def load_followed(*names):
        text = load(*names)
        given = f"#define {_EACH_LANE_ARRIVES} 1\n"  # 1, as the host gives options
        return given * (_EACH_LANE_ARRIVES in text) + text

    source.load = load_followed


def _small(problem):
    """Fewer queries and keys, and fewer rows of softmax."""
    if problem.operation == "softmax":
        problem.arrays = {n: x[:8] for n, x in problem.arrays.items()}
    return problem


def tiers_of(cupy, functions):
    """(what, tier, result, exact) of one call of each tier, kind and dtype."""
    import numpy as np
    import oracle
    import tiers
    from placing import place

    import cupyflash

    rng = np.random.default_rng(0)
    for function in functions or tiers.FUNCTIONS:
        for dtype in ("float32", "bfloat16", "float64"):
            seen = set()
            for kind in tiers.KINDS:
                found = tiers.thresholds(cupy, function, dtype, kind)
                for tier, n in tiers.one_length_of_each_tier(found).items():
                    shape = tiers.KINDS[kind].shape(n)
                    if (tier, shape[2] == 1) in seen or np.prod(shape) > _MOST:
                        continue
                    seen.add((tier, shape[2] == 1))
                    given = tiers.inputs(rng, function, shape, dtype)
                    for form in ("plain", "shifted"):
                        placed = [place(cupy, x, form) for x in given]
                        result = getattr(cupyflash, function)(*placed, axis=1)
                        exact = getattr(oracle, function)(*given, 1)
                        if function == "logsumexp":
                            exact = exact[0]
                        yield (
                            f"{function} {dtype} {shape} {form}",
                            tier,
                            result,
                            exact,
                        )


def run_tiers(cupy, functions):
    """Call each tier of softmax; the number of wrong results."""
    import numpy as np
    from accuracy import finfo, wide

    failures = 0
    for what, tier, result, exact in tiers_of(cupy, functions):
        error = float(
            (np.abs(wide(result) - exact) / np.maximum(1, np.abs(exact))).max()
        )
        is_good = error <= 64 * float(finfo(result.dtype).eps)
        failures += not is_good
        print(f"{tier:32} {what}: {error:.1e}{'' if is_good else ' WRONG'}", flush=True)
    return failures


# --- tools ---------------------------------------------------------------------------


def find_tool():
    """compute-sanitizer on the path or beside CUDA; None without it."""
    found = shutil.which("compute-sanitizer")
    if found is None:
        beside = sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))
        found = str(beside[-1]) if beside else None
    return found


def read_report(text):
    """(errors or None where there is no summary, calls, lines of the tool)."""
    lines = [line.removeprefix("========= ") for line in text.splitlines()
             if line.startswith("=========")]  # fmt: skip
    errors = None
    for line in lines:
        if found := re.search(r"ERROR SUMMARY: (\d+) error", line):
            errors = int(found[1])
        elif found := re.search(r"SUMMARY: (\d+) hazards? displayed \((\d+)", line):
            errors = int(found[1])
    return errors, calls_of(text, ""), lines


def calls_of(text, group):
    """How many calls of a row came out right."""
    return sum(
        line.startswith(f"{group}:" if group else "") and line.endswith(": agrees")
        for line in text.splitlines()
    )


def message_of(lines):
    """What a tool says first beside its summary, in one line."""
    usual = ("COMPUTE-SANITIZER", "Host Frame", "in ")
    kept = [
        line.strip()
        for line in lines
        if line.strip() and "SUMMARY" not in line and not line.startswith(usual)
    ]
    # A race is told in two lines: between Read access at .., and Write access at ..
    while len(kept) > 1 and kept[1].startswith("and "):
        kept[:2] = [f"{kept[0]} {kept[1]}"]
    return kept[0][:400] if kept else ""


def run_tool(program, tool, unit, end=math.inf):
    """{row: what one tool finds in it}; rows of a unit with errors run again alone.

    Nothing is found where it has not ended at time `end`.
    """
    most = min(_SECONDS, end - time.monotonic())
    if most <= 0:
        return {}
    started = time.monotonic()
    each = ["--each-lane-arrives"] * (
        tool == "racecheck" and {*unit} <= _FOLLOWED_BY_LANES
    )
    command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable,
               str(Path(__file__)), *each, *unit]  # fmt: skip
    # A tool a card, by turns.
    cards = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    card = {"CUDA_VISIBLE_DEVICES": cards[TOOLS.index(tool) % len(cards)]}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | card, capture_output=True, text=True,
            timeout=most,
        )  # fmt: skip
        text, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired:
        if most < _SECONDS:
            return {}
        text, code = "", f"none after {_SECONDS} s"
    errors, calls, lines = read_report(text)
    message = message_of(lines)
    if len(unit) > 1 and (errors or message or not calls or code != 0):
        alone = [run_tool(program, tool, (group,), end) for group in unit]
        return {group: found for one in alone for group, found in one.items()}
    seconds = time.monotonic() - started
    found = {"errors": errors, "seconds": round(seconds / len(unit), 1)}
    if message or each:
        found["message"] = message or "compiled so that each lane arrives"
    if errors is None or code not in (0, 9) or not calls:
        last = [line for line in text.splitlines() if line.strip()][-1:]
        found["ended"] = f"exit {code}: {last[0][:300] if last else ''}"
    return {group: {"calls": calls_of(text, group), **found} for group in unit}


def record(path, tools, wanted, jobs, seconds=math.inf):
    """Run the tools, write what they found; 1 if there is an error.

    After so many seconds what has ended is written, and what has not is named.
    """
    import gpu_record

    end = time.monotonic() + seconds
    program = find_tool()
    if program is None:
        print("compute-sanitizer is not installed; it comes with the CUDA toolkit")
        return 2
    chosen = [g for g in groups() if not wanted or {g, g.split("/")[0]} & {*wanted}]
    # Compiled without a tool: the sanitizers then find the kernels in the cache.
    with ThreadPoolExecutor(jobs) as pool:
        codes = dict(zip(chosen, pool.map(_compile, chosen), strict=True))
    wrong = [group for group in chosen if codes[group]]
    if wrong:
        print(f"these fail without any tool, see above: {', '.join(wrong)}", flush=True)
    chosen = [group for group in chosen if not codes[group]]
    # Rows of softmax are quick: what takes time is to start.
    softmax = tuple(g for g in chosen if g.startswith("softmax/"))
    units = [softmax] * bool(softmax) + [(g,) for g in chosen if g not in softmax]
    work = [(tool, unit) for unit in units for tool in tools]
    found, left = {tool: {} for tool in tools}, []
    with ThreadPoolExecutor(jobs) as pool:
        results = pool.map(lambda w: run_tool(program, *w, end), work)
        for (tool, unit), of_rows in zip(work, results, strict=True):
            found[tool] |= of_rows
            left += [f"{tool} {group}" for group in unit if group not in of_rows]
            for group, what in of_rows.items():
                print(f"{tool:10} {group:28} {_told(what)}", flush=True)
    version = subprocess.run([program, "--version"], capture_output=True, text=True)
    name = (re.findall(r"Version ([\d.]+)", version.stdout) or ["unknown"])[0]
    gpu_record.put_sanitizer(path, name, found)
    if left:
        print(f"not run within {seconds:g} s: {', '.join(left)}")
    clean = all(is_clean(what) for of in found.values() for what in of.values())
    return int(not clean or bool(left) or bool(wrong))


def is_clean(what):
    """Whether a tool judged calls of a row that came out right, and found no error."""
    return what["errors"] == 0 and what["calls"] > 0 and "ended" not in what


def _compile(group):
    done = subprocess.run(
        [sys.executable, __file__, group], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        print(f"{group}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}", flush=True)
    return done.returncode


def _told(what):
    """One line on a row."""
    errors = "no verdict" if what["errors"] is None else f"{what['errors']} errors"
    more = what.get("ended") or what.get("message", "")
    return f"{errors}, {what['calls']} calls, {what['seconds']} s {more}".rstrip()


def main():
    """Run them; the exit code says whether all were right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="operations, rows or functions")
    parser.add_argument("--tiers", action="store_true", help="each tier of softmax")
    parser.add_argument("--record", action="store_true", help="run the tools")
    parser.add_argument(
        "--each-lane-arrives", action="store_true", help="so that racecheck follows"
    )
    parser.add_argument("--tool", action="append", choices=TOOLS)
    parser.add_argument("--jobs", type=int, default=8, help="processes (default 8)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="for all tools")
    parser.add_argument("--output", type=Path, help="in place of the record")
    args = parser.parse_args()
    if args.record:
        import gpu_record
        import workers

        os.environ.setdefault("CUDA_VISIBLE_DEVICES", workers.all_cards())
        path = args.output or gpu_record.RECORD
        return record(path, args.tool or TOOLS, args.names, args.jobs, args.seconds)
    if args.each_lane_arrives:
        let_each_lane_arrive()
    import cupy

    # Each array is an allocation of its own: in a pool, what lies behind an array is
    # memory of the process as well, and was written before.
    cupy.cuda.set_allocator(None)
    run = run_tiers if args.tiers else run_rows
    return int(run(cupy, args.names) > 0)


if __name__ == "__main__":
    sys.exit(main())
