"""Classes of the user's own that a run names, and `cait.fit`, which takes them as objects."""

import contextlib
import re
import sys
from collections.abc import Iterator
from contextvars import copy_context
from pathlib import Path

import pytest
import torch
import yaml
from harness import REPO, SMALL, checkpoint
from same import same

import cait
import cait_lightning
from cait import plugins, references, signature
from cait.cli import main
from cait.errors import UserError

PARTS = '''
import cait

class Module(cait.CaiTModule):
    """A loss of its own."""

    def __init__(self, factor: float = 2.0, **settings):
        """
        Args:
            factor: of the loss.
        """
        super().__init__(**settings)
        self.save_hyperparameters("factor")
        plain = self.loss
        self.loss = lambda logits, targets: plain(logits, targets)

    def loss_of(self, logits, targets):
        return self.hparams["factor"] * super().loss_of(logits, targets)

class Other(Module):
    pass

class Data(cait.ImageNetDataModule):
    pass
'''
SHORT = [
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=3",
    "--trainer.limit_val_batches=1",
]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, digits_root: Path) -> Path:
    """A folder with the run `logs/named`, which names its classes."""
    desk = tmp_path_factory.mktemp("desk")
    (desk / "data").mkdir()
    (desk / "data/digits").symlink_to(digits_root)
    (desk / "grove.py").write_text(PARTS)
    (desk / "classes.yaml").write_text("module: grove:Module\ndata_module: grove:Data\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(desk)
        patch.syspath_prepend(desk)
        patch.setattr(sys, "argv", ["cait"])
        main(
            ["fit", *SMALL, *SHORT, "--config=classes.yaml", "--model.factor=3", "--run_name=named"]
        )
    return desk


@pytest.fixture(autouse=True)
def at_the_desk(desk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(desk)
    monkeypatch.syspath_prepend(desk)
    monkeypatch.setattr(sys, "argv", ["cait"])
    yield
    sys.modules.pop("grove", None)


def test_every_verb_finds_the_classes_by_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    config = yaml.safe_load(Path("logs/named/config.yaml").read_text())
    assert (config["module"], config["data_module"]) == ("grove:Module", "grove:Data")
    main(["resume", "named", "--trainer.max_epochs=2"])
    assert checkpoint(Path("logs/named"))["hyper_parameters"]["factor"] == 3
    main(["eval", "named", "--trainer.limit_val_batches=1"])
    main(["predict", "named", "data/digits/val/7/0081.png"])
    assert "0081.png" in capsys.readouterr().out
    loaded = cait.load("logs/named")
    assert type(loaded).__qualname__ == "Module"
    assert loaded.hparams["factor"] == 3


def test_help_lists_the_settings_of_ones_own_class(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--module=grove:Module", "--help"])
    assert "--model.factor" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("--module=grove:Data", "grove:Data is no subclass of cait.CaiTModule"),
        ("--data_module=grove:Module", "grove:Module is no subclass of cait.ImageNetDataModule"),
        ("--module=grove:Modul", "grove has no 'Modul'; did you mean Module?"),
        ("--module=grove.Module", "cannot import 'grove.Module': write it as package.module:name"),
    ],
)
def test_what_is_no_such_class_is_refused(
    word: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["fit", *SMALL, word, "--run_name=refused"])
    assert line in capsys.readouterr().err
    assert not Path("logs/refused").exists()


def test_another_class_does_not_go_on_with_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["resume", "named", "--module=grove:Other", "--trainer.max_epochs=3"])
    assert "the run's module is grove:Module" in capsys.readouterr().err


def typed(*words: str) -> None:
    """Start `main` as the process of `sys.argv[0]` with these words."""
    sys.argv[1:] = words
    with contextlib.suppress(SystemExit):
        copy_context().run(main, data=cait.ImageNetDataModule)


def test_a_console_script_of_ones_own_is_named_as_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CAIT_MAKE", raising=False)
    script = tmp_path / "leafnet"
    script.touch()
    monkeypatch.setattr(sys, "argv", [str(script)])
    typed("fit", "--help")
    assert "usage: leafnet fit " in capsys.readouterr().out
    for words in ([], ["eval"], ["resume"], ["predict"]):
        typed(*words, "--help")
        shown = capsys.readouterr().out
        assert f"usage: leafnet {words[0] if words else 'VERB'}" in shown
        assert "cait " not in shown
    typed("resume")
    assert "leafnet: error: which run? `leafnet resume NAME`" in capsys.readouterr().err
    typed("fit", *SMALL, "--run_name=named")
    told = "leafnet: error: logs/named holds a run: go on with `leafnet resume named` or"
    assert told in capsys.readouterr().err
    typed("predict", "named")
    assert "`leafnet predict --help` lists what there is" in capsys.readouterr().err


def test_a_file_of_code_and_a_program_around_are_named_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CAIT_MAKE", raising=False)
    script = tmp_path / "mine.py"
    script.touch()
    monkeypatch.setattr(sys, "argv", [str(script)])
    typed("fit", *SMALL, "--run_name=named")
    told = f"cait: error: logs/named holds a run: go on with `python {script} resume named` or"
    assert told in capsys.readouterr().err
    around = tmp_path / "pytest"
    around.touch()
    monkeypatch.setattr(sys, "argv", [str(around), "tests"])
    with pytest.raises(SystemExit, match="2"):
        copy_context().run(main, ["resume", "absent"])
    assert "cait: error: there is no run logs/absent" in capsys.readouterr().err


def test_a_strangers_class_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    sys.modules.pop("grove", None)
    for arguments in (
        ["resume", "named"],
        ["eval", "named"],
        ["predict", "named", "data/digits/val/7"],
    ):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert signature.REMEDY in capsys.readouterr().err
        assert "grove" not in sys.modules


def test_the_project_in_the_working_folder_needs_no_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a package in src/ defines, beside pyproject.toml; what it imports or lies elsewhere in the folder asks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    names = ["grove.module:Module", "grove.parts.Announce"]
    for name in names:
        assert not signature.is_of_project(name)
    Path("src/grove").mkdir(parents=True)
    Path("src/grove/__init__.py").touch()
    Path("src/grove/module.py").write_text(PARTS)
    parts = "from os import system\n\nimport grove.module as near\n\nkill = system\nscore = dict(beta=2)\n"
    parts += "\n\nclass Announce:\n    class Inner: ...\n\n    def method(self): ...\n\n\ndef loss(): ...\n"
    Path("src/grove/parts.py").write_text(parts)
    assert not signature.is_of_project(names[0])
    Path("pyproject.toml").touch()
    for name in names:
        assert signature.is_of_project(name)
        signature.check_code(Path("it"), {"metrics": [name]}, None)
    for name in ("logs.grove:x", "logs.run.evil:x", "os:system", "grove; x", "data.data_dir grove"):
        assert not signature.is_of_project(name)
    for name in ("loss", "score"):
        assert signature.is_of_project(f"grove.parts:{name}")
    for name in ("grove.parts:os.system", "grove.parts.os.system", "grove.absent:x"):
        assert not signature.is_of_project(name)
    for name in (
        "system",
        "near",
        "kill",
        "Inner",
        "method",
        "Announc",
        "cait",
    ):  # imported, or not there
        assert not signature.is_of_project(f"grove.parts:{name}")
        assert not signature.is_of_project(f"grove.parts.{name}")
    monkeypatch.chdir(REPO)  # a clone, whose every function a stranger could name else
    for name in ("cait.disk:remove", "cait.disk:os.abort", "cait.disk.remove"):
        assert not signature.is_of_project(name)


def test_fit_from_python_is_the_verb() -> None:
    """The same bits, the same folder, and the best network comes back."""
    main(["fit", *SMALL, *SHORT, "--run_name=typed"])
    settings = dict(word.removeprefix("--").split("=") for word in [*SMALL[2:], *SHORT])
    run = cait.fit(config=[SMALL[1]], settings=settings, run_name="called")
    typed = torch.load("logs/typed/checkpoints/last.ckpt", weights_only=True)
    called = torch.load("logs/called/checkpoints/last.ckpt", weights_only=True)
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert same(typed[part], called[part])
    assert run.predict("data/digits/val/7/0081.png") == cait.load("logs/typed").predict(
        "data/digits/val/7/0081.png"
    )
    words = sys.argv.copy()
    again = cait.fit(resume="called", settings={"trainer.max_epochs": 2})
    assert sys.argv == words  # those of the caller's own script
    assert checkpoint(Path("logs/called"))["global_step"] == 2 * called["global_step"]
    assert again.class_names == [str(digit) for digit in range(10)]
    with pytest.raises(UserError, match="there is no setting"):
        cait.fit(config=[SMALL[1]], settings={"model.lrr": 1})


def test_fit_from_python_takes_a_class_or_its_path() -> None:
    import grove

    settings = dict(word.removeprefix("--").split("=") for word in [*SMALL[2:], *SHORT])
    settings["model.factor"] = "3"
    for name, module in (("by_class", grove.Module), ("by_path", "grove:Module")):
        run = cait.fit(config=[SMALL[1]], settings=settings, run_name=name, module=module)
        assert type(run) is grove.Module
    ours = checkpoint(Path("logs/by_class"))["state_dict"]
    assert same(ours, checkpoint(Path("logs/by_path"))["state_dict"])


def test_a_run_says_which_version_made_it() -> None:
    head = Path("logs/named/config.yaml").read_text().splitlines()[0]
    assert head == f"# cait=={cait.__version__}, format 1"
    assert checkpoint(Path("logs/named"))["cait"] == cait.__version__


def test_a_broken_extra_of_a_package_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    folder = tmp_path / "broken-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: broken\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(f"[{plugins.GROUP}]\nbroken = broken\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugins.extras.cache_clear()
    try:
        assert "broken" not in plugins.extras()
        assert "left out the extra broken: ModuleNotFoundError" in capsys.readouterr().err
    finally:
        monkeypatch.undo()
        plugins.extras.cache_clear()


def test_another_projects_cait_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["cait", "--version"])
    cait_lightning.main()
    assert re.match(r"cait \d+\.\d+\.\d+ ", capsys.readouterr().out)
    folder = tmp_path / "cait-1.3.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: cait\nVersion: 1.3.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        cait_lightning.main()
    assert "the package cait 1.3.0 is another project" in capsys.readouterr().err


def test_a_class_has_the_name_by_which_it_is_imported() -> None:
    assert references.name_of(cait.CaiTModule) == "cait.train.module:CaiTModule"
    assert references.locate(references.name_of(cait.CaiTModule)) is cait.CaiTModule
    assert (REPO / "src/cait/py.typed").is_file()

    class Local(cait.CaiTModule):
        pass

    assert not references.is_path(references.name_of(Local))
