"""Run the examples on a GPU and keep what they print and draw, for docs/on_a_gpu/.

    python tools/gpu_pages.py [names]            all that use a GPU, or some
    python tools/gpu_pages.py --seconds 200      begin none after that

Each writes NAME.txt, the card, the versions and the digest of the script above what was
printed, and NAME.png for its picture. A GPU is needed, and what the examples import.
"""

import argparse
import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "on_a_gpu"
PEERS = ("scipy", "scikit-learn", "POT")
LIMIT = 90  # seconds of one example

# Runs a script in a process of its own and saves the figures that it leaves open.
_RUN = """
import runpy, sys
import matplotlib
matplotlib.use("agg")
script, picture = sys.argv[1:]
sys.path.insert(0, str(__import__("pathlib").Path(script).parent))
runpy.run_path(script, run_name="__main__")
import matplotlib.pyplot as plt
for i, number in enumerate(plt.get_fignums()):
    name = picture if i == 0 else picture.replace(".png", f"_{i + 1}.png")
    plt.figure(number).savefig(name, dpi=80)
"""


def on_gpu(script):
    """Whether an example computes with CuPy where there is a GPU, by itself."""
    text = script.read_text(encoding="utf-8")
    return re.search(r"from _support import .*\bxp\b", text) is not None


def where():
    """One line: the card, and which versions ran on it."""
    from cupyflash._cli import measure

    m = measure.machine(on_gpu=True)
    cuda = f"CUDA {m['driver'] // 1000}.{m['driver'] % 1000 // 10}"
    versions = f"cupyflash {m['cupyflash']} ({m['commit']}), CuPy {m['cupy']}"
    peers = ", ".join(f"{name} {version(name)}" for name in PEERS)
    return f"{m['gpu']}, {cuda}, {versions}, {peers}, {m['date']}"


def version(package):
    """Of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def main():
    """Run, and write what came."""
    sys.path.insert(0, str(ROOT))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no example after"
    )
    args = parser.parse_args()
    wanted, end = args.names, time.monotonic() + args.seconds
    scripts = sorted(filter(on_gpu, (ROOT / "examples").glob("[!_]*.py")))
    if unknown := set(wanted) - {script.stem for script in scripts}:
        sys.exit(f"no example on a GPU is named {', '.join(sorted(unknown))}")
    header = where()
    PAGES.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    failed = []
    for script in scripts:
        if wanted and script.stem not in wanted:
            continue
        if time.monotonic() > end:
            failed.append(f"{script.stem} (no time left)")
            continue
        begun = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, "-c", _RUN, script, PAGES / f"{script.stem}.png"],
                env=os.environ | {"PYTHONPATH": path, "CUPYFLASH_SIZE": "gpu"},
                capture_output=True,
                text=True,
                check=True,
                timeout=LIMIT,
            )
        except subprocess.SubprocessError as error:
            failed.append(script.stem)
            print(f"{script.stem}: {error}\n{error.stderr or ''}", file=sys.stderr)
            continue
        digest = hashlib.sha256(script.read_bytes()).hexdigest()[:12]
        text = f"{header}, script {digest}\n\n{done.stdout}"
        (PAGES / f"{script.stem}.txt").write_text(text, encoding="utf-8")
        lines, took = len(done.stdout.splitlines()), time.monotonic() - begun
        print(f"{script.stem}: {lines} lines, {took:.0f} s", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
