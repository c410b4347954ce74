"""The command `cait`, started only if no other project's package `cait` is installed in the same place."""

import sys
from importlib.metadata import PackageNotFoundError, version


def main() -> None:
    """Run `cait`; end with a line if PyPI's package of this name, another project, is installed too."""
    try:
        other = version("cait")
    except PackageNotFoundError:
        from cait.cli import main as run

        run()
        return
    print(
        f"cait: error: the package cait {other} is another project, and it overwrites files of cait-lightning: "
        "pip uninstall cait, then pip install --force-reinstall --no-deps cait-lightning",
        file=sys.stderr,
    )
    sys.exit(2)
