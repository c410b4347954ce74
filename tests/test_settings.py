import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import pytest
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser

from cait import plugins
from cait.errors import UserError
from cait.settings import Settings, check_choice, check_range, flat, group, save_hyperparameters, values


@dataclass(frozen=True)
class Color:
    white: bool = True
    """Whether white."""


@dataclass(frozen=True)
class Optimizer:
    lr: float = 1e-3
    """The rate: of learning,
    over two lines."""
    mode: Literal["max", "min"] | None = None
    """One of two."""
    mean: Sequence[float] = (1.0, 2.0)
    """Numbers."""
    color: Color = Color()

    def __post_init__(self) -> None:
        check_range(self, "[0, inf)", "lr")
        check_choice(self, {"mode": ("max", "min", None)})


@dataclass(frozen=True)
class Added:
    momentum: float = 0.5
    """Of an extra."""
    lr: float = 1e-3
    """And its rate."""

    def __post_init__(self) -> None:
        check_range(self, "[0, 1]", "momentum")


class Module(LightningModule):
    """A module.

    Args:
        seed: of everything.
    """

    @flat()
    def __init__(self, name: str = "x", *, optimizer: Optimizer, seed: int = 0, given: Settings) -> None:
        super().__init__()
        save_hyperparameters(self, given)
        self.name, self.optimizer, self.seed = name, optimizer, seed


class HasItsOwn(Module):
    def __init__(self, layers: int = 3, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.save_hyperparameters("layers")
        self.layers = layers


FLAT = {"name": "x", "lr": 1e-3, "mode": None, "mean": (1.0, 2.0), "white": True, "seed": 0}
KINDS = [(Module, {}), (HasItsOwn, {"layers": 3})]


@pytest.mark.parametrize(("kind", "more"), KINDS)
def test_the_fields_of_groups_are_given_by_name(kind: Any, more: dict[str, Any]) -> None:
    made = kind(lr=2, white=False, seed=4)
    assert made.optimizer == Optimizer(lr=2, color=Color(white=False))
    assert (made.name, made.seed) == ("x", 4)
    assert list(inspect.signature(Module).parameters) == list(FLAT)
    assert Module("y", 3).name == "y"
    assert Module("y", 3).optimizer.lr == 3
    assert dict(made.hparams) == FLAT | {"lr": 2, "white": False, "seed": 4} | more


@pytest.mark.parametrize(("kind", "more"), KINDS)
def test_a_module_comes_back_from_its_checkpoint(kind: Any, more: dict[str, Any], tmp_path: Path) -> None:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path)
    trainer.strategy.connect(kind(lr=2, **{name: value + 1 for name, value in more.items()}))
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    loaded = kind.load_from_checkpoint(tmp_path / "it.ckpt", weights_only=True)
    assert loaded.optimizer.lr == 2
    assert getattr(loaded, "layers", 4) == 4


@pytest.mark.parametrize(("kind", "more"), KINDS)
def test_the_command_line_knows_each_setting(kind: Any, more: dict[str, Any]) -> None:
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(kind, "model")
    assert parser.get_defaults().model.as_dict() == FLAT | more
    assert parser.parse_args(["--model.lr=2", "--model.white=false"]).model.as_dict()["white"] is False
    text = StringIO()
    parser.print_help(text)
    words = " ".join(text.getvalue().split())
    assert "The rate: of learning, over two lines. (type: float, default: 0.001)" in words
    assert "of everything. (type: int, default: 0)" in words
    assert "Optional[Literal['max', 'min']]" in words


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lrr": 1}, "Module has no setting 'lrr'; did you mean lr?"),
        ({"lr": -1}, "lr must be at least 0, got -1"),
        ({"mode": "mean"}, "mode must be one of max, min, null, got 'mean'"),
    ],
)
def test_a_wrong_setting_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"^{said.replace('?', '.')}$"):
        Module(**settings)


def test_extras_add_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "groups", {"data": [Added]}.__getitem__)

    class Data:
        @flat("data")
        def __init__(self, optimizer: Optimizer, given: Settings) -> None:
            self.optimizer, self.given = optimizer, given

    made: Any = Data(lr=5, momentum=0.25)
    assert made.optimizer.lr == 5
    assert made.given["momentum"] == 0.25
    assert "momentum: Of an extra." in str(Data.__init__.__doc__)
    with pytest.raises(UserError, match=r"^momentum must be in \[0, 1\], got 2$"):
        Data(momentum=2)


def test_a_group_to_plain_values_and_back() -> None:
    held = Optimizer(lr=2, color=Color(white=False))
    assert values(held) == {"lr": 2, "mode": None, "mean": (1.0, 2.0), "white": False}
    assert group(Optimizer, values(held) | {"seed": 1}) == held
