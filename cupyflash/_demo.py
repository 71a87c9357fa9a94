"""python -m cupyflash demo: a photograph denoised exactly, and the ladder."""

import json
import time
from pathlib import Path

import numpy as np

from cupyflash import _console, _demo_ladder, _demo_nlm, _extras, _measure

EXAMPLES = f"""
examples:
  python -m cupyflash demo
  python -m cupyflash demo --size 128          quick
  python -m cupyflash demo --cpu --size 512    the whole photograph without a GPU

Writes nlm.png and demo.json into the output folder. Needs scikit-image and matplotlib:
{_extras.command("demo")}.
"""

# Side of the image when none is asked for: N = side^2 pixels make N^2 pairs.
_SIDE_ON_GPU, _SIDE_ON_CPU = 512, 256


def add_arguments(parser):
    """Size, place and back end."""
    parser.add_argument(
        "--size",
        type=int,
        choices=(64, 128, 256, 512),
        help=f"side of the image (default: {_SIDE_ON_GPU} with a GPU, else "
        f"{_SIDE_ON_CPU})",
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
    """Both parts of the demo; 1 if a package is missing."""
    try:
        import matplotlib  # noqa: F401
        import skimage  # noqa: F401
    except ImportError as error:
        _console.complain(
            f"{error}; {_extras.command('demo')} brings what the demo needs"
        )
        return 1
    args.output.mkdir(parents=True, exist_ok=True)
    on_gpu = not args.cpu and _measure.cuda_device_count() > 0
    xp = np
    if on_gpu:
        import cupy as xp
    machine = _measure.machine(on_gpu)
    print(f"Running on {machine['gpu' if on_gpu else 'processor']}.")
    side = args.size or (_SIDE_ON_GPU if on_gpu else _SIDE_ON_CPU)
    report = {
        "machine": machine,
        "photograph": _photograph(xp, on_gpu, side, args.output / "nlm.png"),
        "ladder": _ladder(xp, on_gpu),
    }
    path = args.output / "demo.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\nPicture: {args.output / 'nlm.png'}\nNumbers: {path}")
    return 0


def _photograph(xp, on_gpu, side, path):
    """Denoise scikit-image's camera; print, draw and return what came of it."""
    from skimage import data, metrics, restoration, transform

    _console.heading("Exact global non-local means of a photograph")
    clean = data.camera() / 255.0
    full = clean.shape[0]
    if side < full:
        clean = transform.downscale_local_mean(clean, (full // side, full // side))
        print(
            f"The {full} x {full} photograph is reduced to {side} x {side}: pairs of "
            f"pixels are\n{(full // side) ** 4} times fewer, so that this ends soon. "
            f"--size {full} takes it as it is."
        )
    num_pixels = clean.size
    print(
        f"{num_pixels:,} patches of {_demo_nlm.PATCH} x {_demo_nlm.PATCH} attend to "
        f"all {num_pixels:,}: {num_pixels**2:.2e} pairs."
    )
    print("Denoising ...", flush=True)
    noise = _demo_nlm.NOISE
    rng = np.random.default_rng(0)
    noisy = clean + noise * rng.standard_normal(clean.shape)

    if on_gpu:
        # Compiled before the clock starts; the photograph pays for arithmetic alone.
        _demo_nlm.denoise(noisy, noise, _demo_nlm.H, xp)
    ours = _measure.run_once(
        lambda: _demo_nlm.denoise(noisy, noise, _demo_nlm.H, xp), on_gpu=on_gpu
    )
    rows = [
        _quality("noisy", clean, noisy, metrics),
        _quality("cupyflash, all pixels", clean, ours.result, metrics)
        | {"seconds": ours.seconds},
    ]
    for name, fast, strength in (("fast mode", True, 0.6), ("slow mode", False, 0.8)):
        start = time.perf_counter()
        windowed = restoration.denoise_nl_means(
            noisy,
            patch_size=_demo_nlm.PATCH,
            patch_distance=11,
            h=strength * noise,
            sigma=noise,
            fast_mode=fast,
        )
        seconds = time.perf_counter() - start
        row = _quality(
            f"scikit-image, 23 x 23 window, {name}", clean, windowed, metrics
        )
        rows.append(row | {"seconds": seconds})
    _console.table(
        ("image", "PSNR, dB", "SSIM", "time"),
        [
            (
                row["image"],
                f"{row['psnr']:.2f}",
                f"{row['ssim']:.3f}",
                _console.seconds(row["seconds"]) if "seconds" in row else "",
            )
            for row in rows
        ],
    )
    score_bytes = num_pixels**2 * 4
    print(
        f"Extra memory of cupyflash: {_console.size(ours.extra_bytes)}. The matrix of "
        f"all pairs would take {_console.size(score_bytes)},\ntwice (S and P)."
    )
    _draw(path, clean, noisy, ours.result, rows)
    return {
        "side": side,
        "noise": noise,
        "h": _demo_nlm.H,
        "pairs": num_pixels**2,
        "images": rows,
        "extra_bytes": ours.extra_bytes,
        "score_bytes": score_bytes,
    }


def _quality(name, clean, image, metrics):
    image = np.clip(image, 0, 1)
    return {
        "image": name,
        "psnr": float(metrics.peak_signal_noise_ratio(clean, image, data_range=1)),
        "ssim": float(metrics.structural_similarity(clean, image, data_range=1)),
    }


def _draw(path, clean, noisy, denoised, rows):
    """Three images side by side, into a file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    titles = (
        "photograph",
        f"noise added: {rows[0]['psnr']:.1f} dB",
        f"cupyflash, mean over all pixels: {rows[1]['psnr']:.1f} dB",
    )
    images = (clean, noisy, denoised)
    for axes, image, title in zip(figure.subplots(1, 3), images, titles, strict=True):
        axes.imshow(image, cmap="gray", vmin=0, vmax=1)
        axes.set_title(title, fontsize=10)
        axes.set_axis_off()
    figure.savefig(path, dpi=110)


def _ladder(xp, on_gpu):
    """Print and return the tables of the four methods."""
    n, d = _demo_ladder.N, _demo_ladder.HEAD_DIM
    one_matrix = _console.size(n * n * 4)
    _console.heading(f"The ladder: N = {n}, d = {d}, float32")
    print(f"S and P, the scores and their softmax, are {one_matrix} each.")
    print(f"\nsoftmax over the rows of S ({n} x {n})")
    softmax = _demo_ladder.softmax_rows(xp, on_gpu)
    _print_methods(softmax)
    print("attention, softmax(q k^T / sqrt(d)) v")
    attention = _demo_ladder.attention_rows(xp, on_gpu)
    _print_methods(attention)
    print("Why naive is not enough: softmax of [x, 0] in float16, which ends at 65504")
    overflow = _demo_ladder.overflow_rows(xp)
    _console.table(
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
    _console.table(
        ("method", "time", "extra memory", "max error against float64"),
        [
            (
                row["method"],
                _console.seconds(row["seconds"]),
                _console.size(row["extra_bytes"]),
                f"{row['max_error']:.1e}",
            )
            for row in rows
        ],
    )
