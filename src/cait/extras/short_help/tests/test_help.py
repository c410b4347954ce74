"""The short help of `cait fit`."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cait.cli import main
from cait.cli.lightning import CaiTCLI
from cait.extras.short_help import text as short
from cait.run.program import Program


def test_the_short_help_says_what_the_parser_says(capsys: pytest.CaptureFixture[str]) -> None:
    class Known(CaiTCLI):
        def parse_arguments(self, parser: Any, args: Any) -> None:
            known.update(self._parser("fit").get_defaults().as_flat().__dict__)
            raise SystemExit

    known: dict[str, Any] = {}
    with pytest.raises(SystemExit):
        Known(["fit"], Program())
    text = " ".join(short.fit().split("\n\n", 2)[2].split())
    named = re.findall(r" --([\w.]+) ((?:(?! --).)*?)\[([^\[\]]*)\]", text)
    assert {name for name, *_ in named} == {name for names in short.SHOWN.values() for name in names.split()}
    for name, _, default in named:
        shown = default if default != "null" else "None"
        assert name == "model.fields" or str(known[name]).lower() in (shown.lower(), f"{shown}.0"), name
    assert max(map(len, short.fit().splitlines())) <= 80
    main(["fit", "--help=model"])
    listed = capsys.readouterr().out
    assert max(map(len, listed.splitlines())) <= 100
    for words in ("  depth: int [24]\n      Number of self-attention blocks.", "layer_scale_init: float | null [null]"):
        assert words in listed
