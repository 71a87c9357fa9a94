"""python -m cupyflash demo: a fit with error bars, a density, and the four methods."""

import functools
import importlib.metadata
import importlib.util
import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cupyflash._cli import console, demo_density, demo_fit, demo_ladder, measure
from cupyflash._core import extras

EXAMPLES = f"""
examples:
  python -m cupyflash demo
  python -m cupyflash demo --size 32           quick
  python -m cupyflash demo --cpu               even if there is a GPU

Writes fit.png and demo.json to the output folder. The picture needs matplotlib, and
the comparison with scikit-learn needs scikit-learn: {extras.command("demo")}.
"""


@dataclass(frozen=True)
class Size:
    """Problem sizes; the fit has side x side pixels."""

    simulations: int
    points: int  # of the density estimate
    sparse: int  # slow methods compute every sparse-th pixel in each direction


SIZES = {
    32: Size(2**12, 2_000, 4),
    64: Size(2**14, 5_000, 4),
    96: Size(2**16, 20_000, 6),
    256: Size(2**18, 50_000, 8),
    512: Size(2**20, 200_000, 16),
}
_SIDE_ON_GPU, _SIDE_ON_CPU = 512, 96

# Another library computes as many points of the density as make this many pairs.
_PAIRS_OF_OTHERS = 20_000_000


def add_arguments(parser):
    """Problem size, output file and back end."""
    parser.add_argument(
        "--size",
        type=int,
        choices=tuple(SIZES),
        help=f"side of the image; the number of simulations follows (default: "
        f"{_SIDE_ON_GPU} with a GPU, else {_SIDE_ON_CPU})",
    )
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo_output"),
        metavar="FOLDER",
        help="where the picture and the numbers go (default: demo_output)",
    )


def run(args):
    """Run all parts of the demo."""
    start = time.perf_counter()
    xp, on_gpu, machine = measure.begin(args)
    side = args.size or (_SIDE_ON_GPU if on_gpu else _SIDE_ON_CPU)
    for package, what in (("matplotlib", "picture"), ("sklearn", "comparison with it")):
        if not _has(package):
            print(f"No {what}: {package} is missing; {extras.command('demo')}.")
    picture = args.output / "fit.png"
    if _has("sklearn"):
        machine["scikit-learn"] = importlib.metadata.version("scikit-learn")
    report = {
        "machine": machine,
        "fit": _fit(xp, on_gpu, side, picture),
        "density": _density(xp, on_gpu, SIZES[side].points),
        "ladder": _ladder(xp, on_gpu),
    }
    report["seconds"] = time.perf_counter() - start  # of the whole demo
    path = args.output / "demo.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(
        f"\nDone in {console.seconds(report['seconds'])}.\nNumbers: {path}"
        + (f"\nPicture: {picture}" if picture.exists() else "")
    )
    return 0


def _has(package):
    return importlib.util.find_spec(package) is not None


def _fit(xp, on_gpu, side, path):
    """Fit every pixel to simulations; print and plot the maps and return the report."""
    size = SIZES[side]
    num_pixels = side * side
    console.heading("A Bayesian fit against simulations: myelin water imaging")
    print(
        f"Each of {side} x {side} pixels has {len(demo_fit.ECHO_TIMES)} echoes with "
        f"noise at 1/{1 / demo_fit.NOISE:.0f} of the first, and is\ncompared "
        f"with {size.simulations:,} simulated decays: "
        f"{num_pixels * size.simulations:.1e} pairs.\n"
        "Simulations and truth are drawn from the same prior:"
    )
    bounds = zip(demo_fit.LOW.tolist(), demo_fit.HIGH.tolist(), strict=True)
    prior = dict(zip(demo_fit.PARAMETERS, bounds, strict=True))
    for name, (low, high) in prior.items():
        print(f"  {name}: uniform from {low:g} to {high:g}")
    rng = np.random.default_rng(0)
    truth = demo_fit.phantom(rng, side)
    clean = demo_fit.simulate(truth)
    measured = clean + demo_fit.NOISE * rng.standard_normal(clean.shape)
    simulations = demo_fit.Simulations(
        demo_fit.draw_from_prior(rng, size.simulations), xp
    )

    every_pixel = np.arange(num_pixels)
    some = every_pixel.reshape(side, side)[:: size.sparse, :: size.sparse].ravel()
    library = "CuPy" if on_gpu else "SciPy"
    methods = {
        "cupyflash": (simulations.posterior, every_pixel),
        f"matmul, {library} softmax, matmul": (simulations.posterior_of_blocks, some),
        "best match, scikit-learn": (
            simulations.best_match,
            some if num_pixels > 10_000 else every_pixel,
        ),
        "best match, matmul and argmax": (
            simulations.best_match_of_blocks,
            every_pixel,
        ),
        "least squares, scipy curve_fit": (demo_fit.least_squares, some),
    }
    if not _has("sklearn"):
        del methods["best match, scikit-learn"]
    rows, maps = [], {}
    for name, (method, pixels) in console.progress(methods.items(), "fitting"):
        y = measured[pixels]
        if method == demo_fit.least_squares:
            run = _clocked(method, y)
        else:
            # Compiling, starting threads and first-touch pages are not to be timed.
            method(y if on_gpu else y[:64])
            run = measure.run_once(functools.partial(method, y), on_gpu=on_gpu)
        mean, *others = run.result
        rows.append(
            {
                "method": name,
                "pixels": len(pixels),
                "seconds": run.seconds * num_pixels / len(pixels),
                "extra_bytes": run.extra_bytes,
                "rmse": _rms(mean - truth[pixels]),
                "posterior_sd": None if others[0] is None else _rms(others[0]),
            }
        )
        maps[name] = (pixels, mean, others)
    extra = rows[0]["extra_bytes"]
    _print_fit(rows, num_pixels)
    score_bytes = 4 * num_pixels * size.simulations
    print(
        f"cupyflash took {console.size(extra)} of extra memory. The matrix of all "
        f"scores would take {console.size(score_bytes)}."
    )
    if _has("matplotlib"):
        _draw(path, side, truth, maps, rows)
    evidence = maps["cupyflash"][2][1]
    return {
        "side": side,
        "simulations": size.simulations,
        "echoes": len(demo_fit.ECHO_TIMES),
        "noise": demo_fit.NOISE,
        "prior": prior,
        "methods": rows,
        "mean_log_evidence": float(evidence.mean()),
        "score_bytes": score_bytes,
    }


def _clocked(method, *arguments):
    """Time a call only: tracing its memory would slow a pure Python program down."""
    start = time.perf_counter()
    result = method(*arguments)
    return measure.Run(result, time.perf_counter() - start, None)


def _rms(x):
    """Root mean square of each column, as plain numbers."""
    return np.sqrt((x**2).mean(axis=0)).tolist()


def _print_fit(rows, num_pixels):
    print("\nRoot mean square error of each method, and the error it reports:")
    console.table(
        (
            "method",
            "pixels",
            "time for all",
            "fraction",
            "reported",
            "T2 myelin, other",
        ),
        [
            (
                row["method"],
                f"{row['pixels']:,}",
                console.seconds(row["seconds"])
                + ("" if row["pixels"] == num_pixels else " *"),
                f"{row['rmse'][0]:.4f}",
                f"{row['posterior_sd'][0]:.4f}" if row["posterior_sd"] else "-",
                "{1:.1f}, {2:.1f} ms".format(*row["rmse"]),
            )
            for row in rows
        ],
    )
    print(
        "* measured on a regular grid of pixels and scaled up; the errors are of "
        "those pixels.\n"
        "Only the first two give error bars. The nearest simulation and the best "
        "curve follow the noise;\nthe mean over all simulations does not. Looking up "
        "the best match needs no exponentials, so it can\nbe quicker than the fit, "
        "but it is less accurate and gives no error bars."
    )


def _draw(path, side, truth, maps, rows):
    """Plot the maps of the myelin fraction and one line through them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = {
        "cupyflash": "posterior mean\n(cupyflash)",
        "best match, matmul and argmax": "best match\n(as scikit-learn)",
        "least squares, scipy curve_fit": "least squares (curve_fit,\n{} pixels)",
    }
    errors = {row["method"]: row["rmse"][0] for row in rows}
    figure = Figure(figsize=(12, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 5, height_ratios=(1.25, 1))
    panels = [figure.add_subplot(grid[0, i]) for i in range(5)]
    scale = {"vmin": demo_fit.LOW[0], "vmax": demo_fit.HIGH[0], "cmap": "viridis"}
    drawn = panels[0].imshow(truth[:, 0].reshape(side, side), **scale)
    panels[0].set_title("truth:\nmyelin water fraction", fontsize=10)
    for axes, (name, title) in zip(panels[1:4], names.items(), strict=True):
        values = maps[name][1][:, 0]
        width = round(len(values) ** 0.5)
        axes.imshow(values.reshape(width, width), **scale)
        title = title.format(f"{len(values):,}")
        axes.set_title(f"{title}, error {errors[name]:.3f}", fontsize=10)
    figure.colorbar(drawn, ax=panels[:4], location="right", shrink=0.8, pad=0.01)
    deviation = maps["cupyflash"][2][0][:, 0].reshape(side, side)
    of_error = panels[4].imshow(deviation, cmap="magma")
    panels[4].set_title("reported deviation\n(cupyflash)", fontsize=10)
    figure.colorbar(of_error, ax=panels[4], shrink=0.8, pad=0.02)
    for axes in panels:
        axes.set_axis_off()

    # A row of the sparse grid, which every method has computed.
    every = side // round(len(maps["least squares, scipy curve_fit"][0]) ** 0.5)
    row = (side // 2) // every * every
    line, x = slice(row * side, (row + 1) * side), np.arange(side)
    mean, (deviation, _) = maps["cupyflash"][1][line, 0], maps["cupyflash"][2]
    deviation = deviation[line, 0]
    axes = figure.add_subplot(grid[1, :])
    axes.fill_between(
        x,
        mean - 2 * deviation,
        mean + 2 * deviation,
        color="tab:green",
        alpha=0.25,
        lw=0,
        label="two standard deviations",
    )
    axes.plot(x, mean, color="tab:green", label="posterior mean")
    match = maps["best match, matmul and argmax"][1][line, 0]
    axes.plot(x, match, ".", color="tab:orange", markersize=4, label="best match")
    pixels, fits, _ = maps["least squares, scipy curve_fit"]
    on_line = (pixels >= line.start) & (pixels < line.stop)
    axes.plot(
        pixels[on_line] - line.start,
        fits[on_line, 0],
        "x",
        color="tab:red",
        label="least squares",
    )
    axes.plot(x, truth[line, 0], "k--", lw=1, label="truth")
    axes.set(
        title=f"myelin water fraction along row {row}", xlim=(0, side - 1), xlabel="x"
    )
    axes.legend(ncols=5, fontsize=8, loc="upper right")
    figure.savefig(path, dpi=100)


def _density(xp, on_gpu, number):
    """Compare log density and gradient with other libraries; print, return a table."""
    dimensions = demo_density.DIMENSIONS
    console.heading("Exact kernel density and its gradient")
    print(
        f"{number:,} points in {dimensions} dimensions, float64, Gaussian kernel: "
        f"{number**2:.1e} pairs."
    )
    data = demo_density.sample(np.random.default_rng(1), number)
    width = demo_density.scott(data)
    on_device = xp.asarray(data)

    warm = on_device if on_gpu else on_device[:64]
    demo_density.log_density(warm, on_device, width)
    run = measure.run_once(
        lambda: demo_density.log_density(on_device, on_device, width), on_gpu=on_gpu
    )
    log_density, gradient = map(demo_fit.to_host, run.result)
    rows = [
        {
            "method": "cupyflash, with gradient",
            "points": number,
            "seconds": run.seconds,
            "difference": None,
        }
    ]
    some = data[: _PAIRS_OF_OTHERS // number]
    others = {
        "scikit-learn KernelDensity": demo_density.by_scikit_learn,
        "the same with rtol=1e-4": lambda *args: demo_density.by_scikit_learn(
            *args, rtol=1e-4
        ),
        "scipy gaussian_kde": demo_density.by_scipy,
    }
    if not _has("sklearn"):
        others = {"scipy gaussian_kde": demo_density.by_scipy}
    for name, method in console.progress(others.items(), "densities"):
        run = _clocked(method, some, data, width)
        error = run.result - log_density[: len(some)]
        rows.append(
            {
                "method": name,
                "points": len(some),
                "seconds": run.seconds * number / len(some),
                "difference": float(np.abs(error).max()),
            }
        )
    console.table(
        ("method", "points", "time for all", "log density differs by"),
        [
            (
                row["method"],
                f"{row['points']:,}",
                console.seconds(row["seconds"])
                + ("" if row["points"] == number else " *"),
                "-" if row["difference"] is None else f"{row['difference']:.1e}",
            )
            for row in rows
        ],
    )
    check = _slope_error(data, width, gradient)
    print(
        "* measured on the first points and scaled up. Only cupyflash gives the "
        f"gradient, which agrees\nwith finite differences to {check:.1e}."
    )
    return {
        "points": number,
        "dimensions": dimensions,
        "bandwidth": width,
        "methods": rows,
        "gradient_error": check,
    }


def _slope_error(data, width, gradient, step=1e-4):
    """Largest difference between the gradient and central differences, of all axes."""
    few = data[:16]
    moves = step * np.eye(data.shape[1])
    slopes = [
        np.subtract(
            *(demo_density.log_density(few + s * m, data, width)[0] for s in (1, -1))
        )
        / (2 * step)
        for m in moves
    ]
    return float(np.abs(np.stack(slopes, axis=1) - gradient[:16]).max())


def _ladder(xp, on_gpu):
    """Compare the four methods; print and return the tables."""
    n, d = demo_ladder.N, demo_ladder.HEAD_DIM
    one_matrix = console.size(n * n * 4)
    console.heading(f"Four methods: N = {n}, d = {d}, float32")
    print(f"S and P, the scores and their softmax, are {one_matrix} each.")
    print(f"\nsoftmax over the rows of S ({n} x {n})")
    softmax = demo_ladder.softmax_rows(xp, on_gpu)
    _print_methods(softmax)
    print("attention, softmax(q k^T / sqrt(d)) v")
    attention = demo_ladder.attention_rows(xp, on_gpu)
    _print_methods(attention)
    print("Why naive is not enough: softmax of [x, 0] in float16, at most 65504")
    overflow = demo_ladder.overflow_rows(xp)
    console.table(
        ("x", "naive", "tiled"),
        [(row["x"], _pair(row["naive"]), _pair(row["tiled"])) for row in overflow],
    )
    for row in overflow:  # JSON has no NaN
        row["naive"] = [None if np.isnan(y) else y for y in row["naive"]]
    return {
        "n": n,
        "head_dim": d,
        "softmax": softmax,
        "attention": attention,
        "overflow": overflow,
    }


def _pair(values):
    return "[" + ", ".join(f"{value:.3g}" for value in values) + "]"


def _print_methods(rows):
    console.table(
        ("method", "time", "extra memory", "max error against float64"),
        [
            (
                row["method"],
                console.seconds(row["seconds"]),
                console.size(row["extra_bytes"]),
                f"{row['max_error']:.1e}",
            )
            for row in rows
        ],
    )
