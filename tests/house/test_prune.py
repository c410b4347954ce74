"""scripts/prune.py: what is gone leaves a page, and nothing else does."""

import re
from pathlib import Path

import prune
from harness import REPO

PAGE = """# A page

Both `a` and `b` do it. Only `gone` does more. See [another](other.md), [this](#two) or [that](#three).

## Two

```bash
do a              # with a comment
do gone \\
  --fast
```

- `a` is kept,
  on two lines
- `gone` is not

| verb | what |
|---|---|
| `gone` | nothing |

To undo it:

```bash
undo gone
```

```text
undone
```

## Three

Words before its first command.

```bash
do gone
```

What it printed.

### Below three

```bash
do a
```

## Four

Only `gone`.
"""
LEFT = """# A page

Both `a` and `b` do it.

## Two

```bash
do a              # with a comment
```

- `a` is kept,
  on two lines
"""


def test_what_is_gone_leaves_a_page(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    prune.prune([tmp_path / "page.md"], re.compile(r"\bgone\b"))
    assert (tmp_path / "page.md").read_text() == LEFT


def test_every_page_of_this_repository_stays_as_it_is(tmp_path: Path) -> None:
    pages = [path for path in REPO.glob("docs/*.md") if "```" in path.read_text()]
    assert len(pages) > 10
    for page in pages:
        assert " ".join(prune.pruned(page.read_text(), lambda _: False).split()) == " ".join(
            page.read_text().split()
        )
