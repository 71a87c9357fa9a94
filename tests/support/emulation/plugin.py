"""pytest on the emulation: tests that are marked gpu run without one.

    PYTHONPATH=tests/support CUPYFLASH_EMULATION=sm_80 \
        python -m pytest -n 0 -p emulation.plugin -m gpu tests/points

Many of them ask more of a GPU than the emulation does in a minute, or what it has not
(streams, graphs, memory pools): choose with -k.
"""

import os

import emulation

emulation.install(
    os.environ.get("CUPYFLASH_EMULATION", "sm_90a"),
    int(os.environ.get("CUPYFLASH_EMULATION_SMS", 0)) or None,
)
