"""scripts/release.py: what a tag must agree with."""

import shutil

import pytest
import release
from harness import REPO


def test_a_release_has_its_version_and_date_in_all_files(tmp_path):
    files = ("CHANGELOG.md", "CITATION.cff", "src/cait/__init__.py")
    (tmp_path / files[2]).parent.mkdir(parents=True)
    for name in files:
        shutil.copy(REPO / name, tmp_path / name)
    version = release.found(tmp_path / files[2], r'^__version__ = "(.+)"$')
    assert release.notes(tmp_path, f"v{version}").startswith("### ")
    with pytest.raises(SystemExit, match=r"^release: the tag is v9\.0\.0"):
        release.notes(tmp_path, "v9.0.0")
    citation = tmp_path / "CITATION.cff"
    citation.write_text(citation.read_text().replace("date-released: 2", "date-released: 3"))
    with pytest.raises(SystemExit, match=r"^release: .*CITATION\.cff has"):
        release.notes(tmp_path, f"v{version}")
