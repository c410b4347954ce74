import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from jsonargparse import set_parsing_settings
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser

from cait import plugins
from cait.cli.options import Line
from cait.data.datamodule import DataSettings
from cait.errors import UserError
from cait.settings import Group, In, Needs, check_names, group, names_in, rules_of, values
from cait.train.module import ModuleSettings


@dataclass(frozen=True)
class Color(Group):
    white: bool = True
    """Whether white."""


@dataclass(frozen=True)
class Optimizer(Group):
    lr: Annotated[float, In("[0, inf)")] = 1e-3
    """The rate: of learning,
    over two lines."""
    mode: Annotated[Literal["max", "min"] | None, Needs("a rate", "lr")] = None
    """One of two."""
    mean: Annotated[Sequence[float], In("(-inf, inf)")] = (1.0, 2.0)
    """Numbers."""
    steps: Annotated[int | None, In("[1, 9]")] = None
    """How many."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps == 7:
            raise UserError("seven is no number of steps")


@dataclass(frozen=True)
class Both(Color, Optimizer):
    """All settings."""


class Module(LightningModule):
    """A module.

    Args:
        seed: of everything.
    """

    def __init__(self, *first: Any, seed: int = 0, **settings: Any) -> None:
        super().__init__()
        check_names(self, Both, settings)
        self.settings = Both(*first, **settings)
        self.save_hyperparameters({"seed": seed, **values(self.settings)})
        self.seed = seed


class HasItsOwn(Module):
    def __init__(self, layers: int = 3, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.save_hyperparameters("layers")
        self.layers = layers


FLAT = {"lr": 1e-3, "mode": None, "mean": (1.0, 2.0), "steps": None, "white": True, "seed": 0}
KINDS = [(Module, {}), (HasItsOwn, {"layers": 3})]


@pytest.mark.parametrize(("kind", "more"), KINDS)
def test_the_fields_of_groups_are_given_by_name(kind: Any, more: dict[str, Any]) -> None:
    made = kind(lr=2, white=False, seed=4)
    assert made.settings == Both(lr=2, white=False)
    assert made.seed == 4
    assert Module(3).settings.lr == 3
    assert dict(made.hparams) == FLAT | {"lr": 2, "white": False, "seed": 4} | more
    assert dict(made.hparams_initial) == dict(made.hparams)


@pytest.mark.parametrize(("kind", "more"), KINDS)
def test_a_module_comes_back_from_its_checkpoint(
    kind: Any, more: dict[str, Any], tmp_path: Path
) -> None:
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path
    )
    trainer.strategy.connect(kind(lr=2, **{name: value + 1 for name, value in more.items()}))
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    loaded = kind.load_from_checkpoint(tmp_path / "it.ckpt", weights_only=True)
    assert loaded.settings.lr == 2
    assert getattr(loaded, "layers", 4) == 4


@pytest.mark.parametrize(("kind", "more"), KINDS)
def test_the_command_line_knows_each_setting(kind: Any, more: dict[str, Any]) -> None:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(kind, "model")
    assert parser.get_defaults().model.as_dict() == FLAT | more
    assert (
        parser.parse_args(["--model.lr=2", "--model.white=false"]).model.as_dict()["white"] is False
    )
    words = " ".join(parser.format_help().split())
    assert "The rate: of learning, over two lines. (type: " in words
    assert "of everything. (type: int, default: 0)" in words
    assert "Literal['max', 'min']" in words


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"lrr": 1}, "Module has no setting 'lrr'; did you mean lr?"),
    ({"lr": -1}, "lr must be at least 0, got -1"),
    ({"lr": math.nan}, "lr must be finite, got nan"),
    ({"lr": "fast"}, "lr must be a number, got 'fast'"),
    ({"lr": True}, "lr must be a number, got True"),
    ({"lr": None}, "lr must be a number, got None"),
    ({"mean": [1.0, math.inf]}, "mean must be finite, got [1.0, inf]"),
    ({"mean": "ab"}, "mean must be a number, got 'ab'"),
    ({"mode": "mean"}, "mode must be one of max, min, null, got 'mean'"),
    ({"steps": 2.5}, "steps must be a whole number, got 2.5"),
    ({"steps": 0}, "steps must be in [1, 9], got 0"),
    ({"steps": 7}, "seven is no number of steps"),
    ({"white": 1}, "white must be true or false, got 1"),
]


@pytest.mark.parametrize(("settings", "said"), REFUSED)
def test_a_wrong_setting_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        Module(**settings)
    assert str(error.value) == said


def test_a_range_has_its_ends_or_not() -> None:
    numbers = [-math.inf, -1.0, 0.0, 0.5, 1.0, math.inf, math.nan]
    held = {
        text: [number for number in numbers if In(text).holds(number)]
        for text in ("[0, 1]", "(0, 1]", "[0, 1)", "(-inf, inf)", "(0, inf)", "(0, inf]")
    }
    assert held == {
        "[0, 1]": [0.0, 0.5, 1.0],
        "(0, 1]": [0.5, 1.0],
        "[0, 1)": [0.0, 0.5],
        "(-inf, inf)": [-1.0, 0.0, 0.5, 1.0],
        "(0, inf)": [0.5, 1.0],
        "(0, inf]": [0.5, 1.0, math.inf],
    }


def test_the_settings_of_extras_are_among_those_of_the_package() -> None:
    for part, kind in {"data": DataSettings, "model": ModuleSettings}.items():
        for added in plugins.groups(part):
            assert {*names_in(added)} <= {*names_in(kind)}
            assert issubclass(added, Group)


def test_the_text_of_a_rule_is_for_the_help() -> None:
    rules = rules_of(Optimizer)
    assert [rule.help for rule in rules["lr"]] == ["", "range: [0, inf)"]
    assert [rule.help for rule in rules["mode"]] == ["", "needs: a rate"]


def test_a_group_to_plain_values_and_back() -> None:
    settings = Both(lr=2, white=False)
    assert values(settings, Color) == {"white": False}
    assert values(settings) == {
        "lr": 2,
        "mode": None,
        "mean": (1.0, 2.0),
        "steps": None,
        "white": False,
    }
    assert group(Both, values(settings) | {"seed": 1}) == settings
    assert "lr" in inspect.signature(Both).parameters


def test_where_a_setting_comes_from() -> None:
    line = Line("fit", ["--model.fields.depth=3", "--trainer.callbacks+", "Timer", "word"])
    line.layers = [(None, {"model": {"lr": 1, "fields": {"depth": 2}}}), (None, {"data.root": "x"})]
    assert line.typed == {"model.fields.depth", "trainer.callbacks"}
    sources = line.sources
    last = {
        name: sources.last([name])
        for name in ("model.lr", "model.fields", "model", "data.root", "seed")
    }
    assert last == {"model.lr": 0, "model.fields": 2, "model": 2, "data.root": 1, "seed": -1}
    assert sources.last(["data.root", "model.lr"]) == 1
    assert sources.given({"model": {"lr": 1, "name": "x"}, "data": {"root": "y"}}) == {
        "model.lr": 1,
        "data.root": "y",
    }
