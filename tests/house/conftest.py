"""The discipline of this repository, `make house`; a project made of it does without (docs/your_project.md)."""

import sys

from harness import REPO

sys.path += [str(REPO / name) for name in ("benchmarks", "docs", "scripts")]
