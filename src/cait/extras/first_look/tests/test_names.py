"""The settings that are read from the source are those of the real parser."""

from __future__ import annotations

from typing import Any

import pytest

from cait.cli.lightning import CaiTCLI
from cait.extras.first_look import names
from cait.run.program import Program


@pytest.mark.parametrize(("verb", "lightnings"), [("fit", "fit"), ("eval", "validate")])
def test_they_are_those_of_the_parser(verb: str, lightnings: str) -> None:
    found = []

    class OnlyParser(CaiTCLI):
        def parse_arguments(self, *_: Any) -> None:
            found.extend(self._known())
            raise SystemExit

    with pytest.raises(SystemExit):
        OnlyParser([lightnings], Program())
    assert names.settings(verb) == found


def test_a_class_that_takes_any_name_is_not_certain() -> None:
    with pytest.raises(names.NotCertainError):
        names.parameters("torch.nn.modules.module", "Module")
