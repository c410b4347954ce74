"""The discipline of this repository, `make house`."""

import sys

from harness import REPO

sys.path += [str(REPO / name) for name in ("benchmarks", "docs", "scripts")]
