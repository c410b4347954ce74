"""The messages of contrib's verbs; see tests/support/golden.py."""

import pytest
from golden import cases, check
from harness import REPO

FILES = sorted(REPO.glob("contrib/**/tests/golden.yaml"))


@pytest.mark.parametrize("case", [*cases(*FILES)])
def test_what_is_typed_gets_its_line(case, tmp_path, request):
    check(case, tmp_path, request)
