"""Every message that a user may meet is written down in a golden file; see tests/support/golden.py."""

import pytest
from golden import cases, check
from harness import REPO

FILES = [
    *sorted((REPO / "tests/cli/golden").glob("*.yaml")),
    *sorted(REPO.glob("src/cait/extras/*/tests/golden.yaml")),
]


@pytest.mark.parametrize("case", [*cases(*FILES)])
def test_what_is_typed_gets_its_line(case, tmp_path, request):
    check(case, tmp_path, request)
