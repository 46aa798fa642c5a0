"""The benchmark for machines with a CUDA device: `python -m benchmarks core.gpu`, and shorter.

python -m benchmarks.gpu [--quick] [--repeats N] [--record TOPIC]
"""

from __future__ import annotations

import sys

from benchmarks.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["core.gpu", *sys.argv[1:]]))
