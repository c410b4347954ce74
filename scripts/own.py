#!/usr/bin/env python3
"""Make a project of your own of this template: `make own NAME=mypackage KEEP="recipe visualize" [CAIT=no]`.

It deletes what is the template's alone: extras that KEEP does not name, contrib, benchmarks, the paper's configurations
and pages, the tests of its discipline; and CaiT, if CAIT=no. It takes what is said of them out of the pages that stay,
and gives the package its name (scripts/rename.py). It starts from a clean work tree: `git diff` shows all of it.
"""

import argparse
import re
import shutil
import subprocess
import traceback
from pathlib import Path

import prune
import rename

REPO = rename.REPO
SOURCE = rename.package(REPO)
EXTRAS = SOURCE / "extras"
GONE = """
    .github/ISSUE_TEMPLATE .github/pull_request_template.md .github/workflows/contrib.yml .github/workflows/release.yml
    CHANGELOG.md CITATION.cff CONTRIBUTING.md SECURITY.md benchmarks configs/imagenet configs/transfer contrib
    docs/cait.ipynb docs/cait.md docs/check.py docs/coming_from.md docs/depth.png docs/depth.py docs/first.ipynb
    docs/install.md docs/laws.md docs/picture.py docs/recipe.md docs/speed.md docs/stems.md docs/train.svg
    docs/which_model.md docs/your_project.md
    scripts/own.py scripts/own_readme.md scripts/prune.py scripts/release.py scripts/rename.py tests/house tests/laws
"""
"""What is the template's alone."""
OF_CAIT = """
    src/*/model/attention.py src/*/model/cait.py src/*/model/residual.py
    src/*/extras/paper src/*/extras/recipe/stem.py src/*/extras/recompute src/*/extras/publish/timm_calls.py
    src/*/extras/*/tests/test_cait*.py tests/support/cait_*.py tests/*/test_cait*.py tests/test_cait*.py
"""
SMALL_VIT = "timm/vit_tiny_patch16_224"
"""It takes the place of CaiT as the default, on the digits and in the tests; it has fields of the same names."""
WITHOUT_CAIT = (
    ("# CaiT (?=on the emb)", "# A small ViT "),
    ("CaiT (?=on the emb)", "a small ViT "),
    ("CaiT 6×96", SMALL_VIT),
    (", recompute attention", ""),
    (r"#   reached: .*\n", ""),  # a figure of CaiT's
)
"""What else it says of CaiT."""
PARTS_OF_CAIT = (
    r"\bCaiT(?! 6×)|\bxxs24\b|\b(model/|model\.)?cait\.(py|CaiT)|class.(atten|token)|talking heads"
)
"""What no page says without it."""
NO_VARIANTS = '''"""Networks that have names of their own: none."""

from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {}
'''
SAID = (
    (
        'Train CaiT, "Going deeper with Image Transformers", with PyTorch Lightning.',
        "Train image classifiers.",
    ),
    (
        r'"A PyTorch Lightning template for CaiT, \"Going deeper with Image Transformers\""',
        '"Image classifiers"',
    ),
    ('site_name = "CaiT"', f'site_name = "{SOURCE.name}"'),
    (
        "A PyTorch Lightning template for CaiT, Going deeper with Image Transformers",
        "Image classifiers",
    ),
    ("configs/imagenet/xxs24_224.yaml", "configs/base.yaml"),
    ("make test\nmake house\n", "make test\n"),
    ("[test-all, docs docs-check]", "[test-all, docs]"),
    (" contrib/make.mk contrib/*/make.mk benchmarks/make.mk tests/*/make.mk", ""),
    (" contrib/*/__init__.py", ""),
    (" $(wildcard tests/house contrib)", ""),
    (
        "The tests, and this repository's own discipline, on a clean checkout.",
        "The tests, on a clean checkout.",
    ),
    ('[".*", "house"]     # `make house`', '[".*"]'),
    ("; takes minutes, make test-kernel", ""),
    ("; `make bench-gpu` runs it", ""),
)
"""Texts, and what a project of one's own says there."""
TARGETS = re.compile(r"^\.PHONY: docs-check\n.*\n.*\n\n", re.MULTILINE)
"""Targets of make that go."""
FOR = re.compile(r"^.*# for ([\w/, ]+)\n", re.MULTILINE)
"""Packages that only these extras need, in pyproject.toml."""


def words_of(folder: Path) -> set[str]:
    """Patterns of what only this extra has: its verbs, targets and settings."""
    text = "".join(
        path.read_text() for path in (folder / "__init__.py", folder / "make.mk") if path.exists()
    )
    verbs = re.findall(r'^    "([a-z-]+)": Verb|^([a-z-]+):', text, re.MULTILINE)
    options = {*re.findall(r'Setting\(\s*"(\w+)"', text)}
    for line in re.findall(r".*\bline\.typed\b.*", text):
        options |= {*re.findall(r'"(\w+)"', line)}
    for room, file, name in re.findall(r'"(data|model)": "[\w.]*?(\w+):(\w+)"', text):
        holder = folder / f"{file}.py" if file != folder.name else folder / "__init__.py"
        fields = re.split(rf"^class {name}\b", holder.read_text(), flags=re.MULTILINE)[1].split(
            "\n\n\n"
        )[0]
        options |= {
            f"{room}.{field}" for field in re.findall(r"^    (\w+): ", fields, re.MULTILINE)
        }
    return {rf"\b(cait|make) {''.join(verb)}\b" for verb in verbs} | {
        rf"--{re.escape(name)}\b" for name in options
    }


def importers(module: Path) -> list[Path]:
    """What imports a module that extras share."""
    wanted = re.compile(rf"\bextras(\.| import ([\w, ]*\b)?){module.stem}\b")
    others = [*SOURCE.rglob("*.py"), *(REPO / "tests").rglob("*.py")]
    return [path for path in others if path != module and wanted.search(path.read_text())]


def is_source(path: Path) -> bool:
    return path.exists() and SOURCE in path.parents


def without_cait() -> None:
    """Delete CaiT. A small ViT of timm's has its place: any other network is a setting."""
    for pattern in OF_CAIT.split():
        for path in REPO.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (SOURCE / "model/config.py").write_text(NO_VARIANTS)
    for name in ("publish", "recipe"):
        init = EXTRAS / name / "__init__.py"
        if init.exists():
            init.write_text(re.sub(r"GROUPS = .*\n", "", init.read_text()))
    for path in rename.files(REPO):
        if path.suffix in (".py", ".yaml", ".md") or path.name == "Makefile":
            text = path.read_text()
            # pages lose what else they say of it
            name = r'(?<=")xxs24(?=")' if path.suffix == ".md" else r"\bxxs24\b"
            for old, new in ((name, SMALL_VIT), *WITHOUT_CAIT):
                text = re.sub(old, new, text)
            path.write_text(text)


def delete(keep: set[str]) -> re.Pattern[str]:
    """Delete what does not stay; returns what no page may mention any more."""
    extras = [path.parent for path in EXTRAS.glob("*/__init__.py") if path.parent.name not in keep]
    contrib = [path.parent for path in REPO.glob("contrib/*/__init__.py")]
    words = {r"\bmake (bench(-\w+)?|house|laws|own|rename|torture)\b"}.union(
        *map(words_of, [*extras, *contrib])
    )
    gone = [*(path.relative_to(REPO).as_posix() for path in extras), *GONE.split()]
    for path in (REPO / name for name in gone):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shared = {path: importers(path) for path in EXTRAS.glob("[a-z]*.py")}
    while unused := [path for path, users in shared.items() if not any(map(is_source, users))]:
        for path in unused:
            for name in (path, path.with_suffix(".html"), *shared.pop(path)):
                name.unlink(missing_ok=True)
    return re.compile(
        "|".join([*sorted(words), *(rf"(?<![\w.]){re.escape(name)}\b" for name in gone)])
    )


def adapt(keep: set[str]) -> None:
    """Settings, the navigation and texts that speak of what is gone."""
    for path in rename.files(REPO):
        if path.suffix in (".py", ".md", ".toml", ".sbatch", ".yaml", ".yml") or path.name in (
            "Makefile",
            "run",
        ):
            text = before = path.read_text()
            for old, new in SAID if "paper" in keep else (*SAID, (", or the row PAPER", "")):
                text = text.replace(old, new)
            text = TARGETS.sub("", text)
            if text != before:
                path.write_text(text)
    project, site = REPO / "pyproject.toml", REPO / "docs/site.toml"
    text = FOR.sub(
        lambda line: line[0] if keep & {*line[1].split(", ")} else "", project.read_text()
    )
    groups = {*re.findall(r"^(\w+) = \[", text, re.MULTILINE)}
    names = re.compile(r"(?<=cait-lightning\[)[\w,]+")
    project.write_text(
        names.sub(lambda found: ",".join(sorted(groups & {*found[0].split(",")})), text)
    )
    place = re.compile(r'    \{ ".*" = "(.*)" \},\n')
    text = place.sub(
        lambda row: row[0] if (REPO / row[1]).exists() or "settings" in row[1] else "",
        site.read_text(),
    )
    site.write_text(re.sub(r'  \{ "\w+" = \[\n  \] \},\n', "", text))


def make(name: str, keep: set[str], cait: bool) -> str:
    """Change everything; returns a sentence about it."""
    readme = (REPO / "scripts/own_readme.md").read_text()
    gone = delete(keep)
    adapt(keep)
    if not cait:
        without_cait()
        readme = readme.replace("a small CaiT", "a small ViT of timm's")
        gone = re.compile(f"{gone.pattern}|{PARTS_OF_CAIT}")
    (REPO / "README.md").unlink()
    prune.prune([path for path in rename.files(REPO) if path.suffix == ".md"], gone)
    (REPO / "README.md").write_text(readme)
    return f"{rename.rename(REPO, name)} Extras: {', '.join(sorted(keep)) or 'none'}."


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "name", help="of the package, as `import name` has it, of its command and of the project"
    )
    parser.add_argument("--keep", default="", help='the extras that stay, as "recipe visualize"')
    parser.add_argument(
        "--cait",
        choices=["yes", "no"],
        default="yes",
        help="whether CaiT stays; timm's networks do",
    )
    given = parser.parse_args()
    keep, known = {*given.keep.split()}, {path.parent.name for path in EXTRAS.glob("*/__init__.py")}
    rename.check(given.name, REPO)
    if keep - known:
        raise SystemExit(
            f"own: there is no extra {min(keep - known)}; there are {', '.join(sorted(known))}"
        )
    status = subprocess.run(
        ["git", "status", "--porcelain"], cwd=REPO, capture_output=True, text=True
    )
    if status.stdout or status.returncode:
        first = (
            "commit or stash your changes"
            if status.stdout
            else "`git init`, add and commit all files"
        )
        raise SystemExit(f"own: {first} first, so that `git diff` shows what this changes")
    try:
        print(make(given.name, keep, given.cait == "yes"))
    except BaseException:
        traceback.print_exc()
        raise SystemExit(
            "own: it stopped halfway; `git reset --hard && git clean -fd` brings all back"
        ) from None


if __name__ == "__main__":
    main()
