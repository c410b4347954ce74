"""Classes of the user's own that a run names or a script hands over, and `cait.fit`, which takes them as objects."""

import importlib
import re
import shutil
import sys
from contextvars import copy_context
from pathlib import Path

import pytest
from harness import (
    REPO,
    SMALL,
    call,
    checkpoint,
    in_folder,
    link_digits,
    parsed,
    rows,
    script,
    slow,
    works,
)
from same import same

import cait as package
import cait_lightning
from cait import plugins, references
from cait.cli import main
from cait.cli.command import verbs

MINE = '''
import cait
import torch
from cait.cli import main

class Module(cait.CaiTModule):
    """A figure of its own."""

    def __init__(self, answer: int = 41, **settings):
        """
        Args:
            answer: to everything.
        """
        super().__init__(**settings)
        self.save_hyperparameters("answer")
        plain = self.loss
        self.loss = lambda logits, targets: plain(logits, targets)  # which no file could hold

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.log("val/answer", torch.tensor(self.hparams["answer"] + self.current_epoch / 4))

class Data(cait.ImageNetDataModule):
    pass

if __name__ == "__main__":
    main(module=Module, data=Data)
'''
SHORT = [
    "--trainer.limit_train_batches=2",
    "--trainer.limit_val_batches=1",
    "--trainer.log_every_n_steps=1",
    "--data.num_workers=0",
]
IMAGE = "data/digits/val/7/0081.png"


@pytest.fixture
def desk(tmp_path, digits_root):
    """A folder with the digits and the classes."""
    link_digits(tmp_path, digits_root)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "classes.yaml").write_text("module: mine:Module\ndata_module: mine:Data\n")
    return tmp_path


def by_name(desk, *words):
    named = ["--config=classes.yaml"] if words[0] == "fit" else []  # the run says it then
    works(call(desk, *words, *named))


def by_script(desk, *words):
    with in_folder(desk) as patch:
        patch.setattr(sys, "argv", ["mine.py"])
        mine = importlib.import_module("mine")
        main([*words], module=mine.Module, data=mine.Data)


def by_script_of_two_processes(desk, *words):
    """Lightning starts the second one as `python mine.py fit ...` too."""
    if words[0] != "fit":
        by_script(desk, *words)
        return
    works(script("mine.py", desk, *words, "--trainer.devices=2"))


@pytest.mark.parametrize("verb", [by_name, *slow(by_script, by_script_of_two_processes)])
def test_a_module_and_data_of_ones_own_have_every_verb(verb, desk):
    best = ["--best_metric=val/answer", "--best_mode=min"]
    settings = ["--trainer.max_epochs=1", "--model.answer=42", "--ema.decay=0.9", *best]
    verb(desk, "fit", *SMALL, *SHORT, *settings, "--run_name=mine")
    one = ["--trainer.devices=1", "--data.check_resume=false"]
    verb(desk, "resume", "mine", "--trainer.max_epochs=2", *one)
    run = desk / "logs/mine"
    assert checkpoint(run)["global_step"] == 4
    answers = [row["val/answer"] for row in rows(run) if row["val/answer"]]
    assert answers == ["42.0", "42.25"]
    # the smaller one
    assert parsed(run / "checkpoints/best.ckpt")["epoch"] == 0
    verb(desk, "predict", "mine", IMAGE, "--output=predictions.csv")
    assert IMAGE in (desk / "predictions.csv").read_text()
    if "export" in verbs():
        verb(desk, "export", "mine")
        assert (run / "export/timm/model.safetensors").is_file()
    # The run names its classes, so the command finds them without the script.
    scored = call(desk, "eval", "mine", "--trainer.devices=1")
    assert re.search(r"answer +│ +42\.0000 +│", scored.stdout)
    scores = parsed(run / "evaluation.json")
    assert scores["raw"]["answer"] == 42
    assert scores["class_names"] == [*"0123456789"]
    if verb is not by_script_of_two_processes:  # there the best is of a class in __main__
        with in_folder(desk):
            loaded = package.load("mine")
        assert type(loaded).__qualname__ == "Module"
        assert loaded.hparams["answer"] == 42


def test_another_class_of_data_goes_on_if_it_is_told_to(desk, trained):
    """Lightning looks for the class's own name, and would pass over another's part in silence."""
    shutil.copytree(trained, desk / "logs/mine")
    other = ["--data_module=mine:Data", "--data.check_resume=false"]
    by_name(desk, "resume", "mine", "--trainer.max_epochs=2", *other)
    assert checkpoint(desk / "logs/mine")["global_step"] == 12
    first = ["--data_module=cait:ImageNetDataModule", "--data.check_resume=true"]
    refused = call(desk, "resume", "mine", "--trainer.max_epochs=3", *first)
    assert refused.returncode == 2
    assert "class of the data module was Data, is ImageNetDataModule" in refused.stderr


def test_fit_from_python_is_the_verb(desk):
    """The same bits, the same folder, and the best network comes back, of a class or the path of one."""
    config, words = SMALL[1], [*SMALL[2:], *SHORT, "--trainer.max_epochs=1", "--model.answer=3"]
    settings = dict(word.removeprefix("--").split("=") for word in words)
    by_name(desk, "fit", f"--config={config}", *words, "--run_name=typed")
    typed = checkpoint(desk / "logs/typed")
    with in_folder(desk) as patch:
        patch.setattr(sys, "argv", ["my_script.py", "word"])
        mine = importlib.import_module("mine")
        for name, module in {"by_class": mine.Module, "by_path": "mine:Module"}.items():
            run = package.fit(
                config=[config], settings=settings, run_name=name, module=module, data=mine.Data
            )
            assert type(run) is mine.Module
            assert run.predict(IMAGE) == package.load("typed").predict(IMAGE)
            called = checkpoint(Path("logs", name))
            for part in ("hyper_parameters", "state_dict", "optimizer_states", "lr_schedulers"):
                assert same(called[part], typed[part]), part
        package.fit(resume="by_path", settings={"trainer.max_epochs": 2})
        assert checkpoint(Path("logs/by_path"))["global_step"] == 4
        assert sys.argv == ["my_script.py", "word"]


def test_a_script_is_named_as_it_is_started(desk, trained, capfd):
    shutil.copytree(trained, desk / "logs/mine")
    words = ["fit", "--config=digits.yaml", "--run_name=mine"]
    with in_folder(desk) as patch:
        patch.setattr(sys, "argv", ["mine.py"])
        with pytest.raises(SystemExit, match="2"):
            main(words, data=package.ImageNetDataModule)
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("cait: error: logs/mine ")
    assert "`python mine.py resume mine`" in line


def test_a_program_around_is_not_what_is_typed(tmp_path, monkeypatch, capsys):
    program = tmp_path / "pytest"
    program.touch()
    monkeypatch.setattr(sys, "argv", [str(program), "tests"])
    with pytest.raises(SystemExit, match="2"):
        copy_context().run(main, ["resume", "absent"])
    assert capsys.readouterr().err.startswith("cait: error: ")


def test_a_broken_extra_of_a_package_is_left_out(tmp_path, monkeypatch, capsys):
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    add_package(tmp_path, "broken")
    entry_points = tmp_path / "broken-1.3.0.dist-info/entry_points.txt"
    entry_points.write_text(f"[{plugins.GROUP}]\nbroken = broken\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugins.extras.cache_clear()
    try:
        assert "broken" not in plugins.extras()
        assert "left out the extra broken: ModuleNotFoundError" in capsys.readouterr().err
    finally:
        monkeypatch.undo()
        plugins.extras.cache_clear()


def add_package(folder, name):
    """What pip leaves of an installed package."""
    info = folder / f"{name}-1.3.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {name}\nVersion: 1.3.0\n")


def test_another_projects_cait_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cait", "--version"])
    cait_lightning.main()
    assert capsys.readouterr().out.startswith(f"cait {package.__version__} ")
    add_package(tmp_path, "cait")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        cait_lightning.main()
    assert "the package cait 1.3.0 is another project" in capsys.readouterr().err


def test_a_class_has_the_name_by_which_it_is_imported():
    name = references.name_of(package.CaiTModule)
    assert name == "cait.train.module:CaiTModule"
    assert references.locate(name) is package.CaiTModule
    assert (REPO / "src/cait/py.typed").is_file()

    class Local(package.CaiTModule):
        pass

    assert not references.is_path(references.name_of(Local))
