"""What validates in a folder that grows, and what runs write beside the images."""

import csv
import shutil
from pathlib import Path

import pytest
import torch
from harness import SMALL, slow

from cait.cli import main
from cait.data.folder import scan_flat
from cait.data.source import open_source
from cait.errors import UserError
from cait.model.network import NetworkSettings
from cait.train.losses import DistillationSettings
from cait.train.teacher import load_teacher


def test_a_class_keeps_an_image_to_learn_from_and_may_hold_folders(tmp_path: Path) -> None:
    """Though all would be held out; and of so many images it is no folder of runs."""
    for number in range(3 + 20):
        path = tmp_path / ("few" if number < 3 else "many") / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_text(str(number))
    (tmp_path / "many/logs").mkdir()
    source = open_source(str(tmp_path), val_fraction=0.99)
    assert source.class_names == ["few", "many"]
    assert [source.train.labels.count(label) for label in (0, 1)] == [1, 1]


@pytest.mark.parametrize("logs", ["logs", *slow("results")])
def test_what_runs_write_is_no_data(logs: str, here: Path, digits_root: Path) -> None:
    """From inside the folder of the images: two runs. The second holds out what the first did."""
    for label in "012":
        (here / label).mkdir(exist_ok=True)
        for path in sorted((digits_root / "train" / label).iterdir())[:20]:
            shutil.copy(path, here / label)
    settings = [
        "--data.root=.",
        "--data.batch_size=16",
        "--trainer.max_epochs=1",
        "--data.num_workers=0",
    ]
    settings += ["--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1"]
    settings += [f"--trainer.default_root_dir={logs}"] if logs != "logs" else []
    main(["fit", *SMALL, *settings, "--run_name=a"])
    written = (
        f"{logs}/a/drawn.png",
        f"{logs}/drawn.png",
        f"{logs}/many/fold-0/.lock",
        "__pycache__/my_net.pyc",
    )
    for place in written:
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(next((digits_root / "val/0").iterdir()), place)
    held = Path(f"{logs}/a/validation.csv").read_text()
    with open(f"{logs}/a/validation.csv", newline="") as lines:
        assert all(Path(row["path"]).is_file() for row in csv.DictReader(lines))
    main(["resume", f"{logs}/a", "--trainer.max_epochs=2"])
    main(["fit", *SMALL, *settings, "--run_name=b", f"--data.val_list={logs}/a/validation.csv"])
    assert Path(f"{logs}/a/validation.csv").read_text() == held
    assert sorted(Path(f"{logs}/b/validation.csv").read_text().splitlines()) == sorted(
        held.splitlines()
    )
    assert not [path for path, _ in scan_flat(Path()) if path.startswith(logs)]


def test_a_run_validates_on_what_it_has_held_out(
    here: Path,
    digits_root: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def add(numbers: slice) -> None:
        for label in "0123":
            Path("grow", label).mkdir(parents=True, exist_ok=True)
            for path in sorted((digits_root / "train" / label).iterdir())[numbers]:
                shutil.copy(path, Path("grow", label))

    add(slice(30))
    settings = [
        "--data.root=grow",
        "--data.batch_size=16",
        "--trainer.max_epochs=1",
        "--data.num_workers=0",
    ]
    main(["fit", *SMALL, *settings, "--run_name=run"])
    held = Path("logs/run/validation.csv").read_text()
    add(slice(30, 45))
    more = ["resume", "run", "--trainer.max_epochs=2"]
    for given, words in (
        (
            more,
            "training pictures was 108, is 168; to continue anyway add --data.check_resume false",
        ),
        (
            [*more, "--trainer.gradient_clip_algorithm=norm"],
            "--trainer.gradient_clip_algorithm norm does nothing without a gradient_clip_val",
        ),
        (
            [*more, "--data.val_fraction=0.5", "--data.check_resume=false"],
            "leave out --data.val_fraction, which was",
        ),
        (
            ["eval", "run", "--data.val_fraction=0.5"],
            "--data.val_fraction does nothing where logs/run says",
        ),
    ):
        with pytest.raises(SystemExit):
            main(given)
        assert words in capsys.readouterr().err
    main([*more, "--data.check_resume=false"])
    assert "training pictures was 108, is 168" in caplog.text
    assert Path("logs/run/validation.csv").read_text() == held
    Path("logs/run/validation.csv").unlink()
    main(["resume", "run", "--trainer.max_epochs=3", "--data.check_resume=false"])
    assert "logs/run/validation.csv is gone: grow is divided anew" in caplog.text


@pytest.mark.parametrize("classes", [["b", "c", "a"], ["a", "b", "d"]])
def test_names_decide_what_a_teacher_knows(classes: list[str], tmp_path: Path) -> None:
    """Not their number: a teacher of the same classes in another order judges, one of others is refused."""
    sizes = dict(
        img_size=8, num_classes=3, fields=dict(embed_dim=16, depth=1, num_heads=2, patch_size=4)
    )
    network = NetworkSettings("xxs24", **sizes)
    normalization = ([0.5] * 3, [0.5] * 3)
    built = network.build_network().eval()
    checkpoint = {
        "pytorch-lightning_version": "2.6.6",
        "global_step": 1,
        "state_dict": {f"model.{key}": value for key, value in built.state_dict().items()},
        "hyper_parameters": {
            "name": "xxs24",
            **sizes,
            "mean": normalization[0],
            "std": normalization[1],
        },
        "ImageNetDataModule": {"class_names": ["a", "b", "c"], "depends_on": {}},
    }
    torch.save(checkpoint, path := tmp_path / "teacher.ckpt")
    settings = DistillationSettings("hard", teacher=str(path))
    if "d" in classes:
        with pytest.raises(UserError, match="knows other classes than the data: c, d"):
            load_teacher(settings, network, normalization, classes)
    else:
        images = torch.randn(2, 3, 8, 8)
        logits = load_teacher(settings, network, normalization, classes)(images)
        torch.testing.assert_close(logits, built(images)[:, [1, 2, 0]])
        checkpoint["hyper_parameters"] |= {"mean": [0.5] * 4, "std": [0.5] * 4}
        torch.save(checkpoint, path)
        # gray is RGB
        with pytest.raises(UserError, match="takes 4 channels, the student 1: give the student"):
            load_teacher(settings, network, ([0.5], [0.5]), classes)
        checkpoint["hyper_parameters"]["task"] = "several"
        torch.save(checkpoint, path)
        with pytest.raises(UserError, match="gives an image several classes, the data one"):
            load_teacher(settings, network, normalization, classes)
        with pytest.raises(UserError, match=r"the teacher .* is a folder: name a checkpoint"):
            load_teacher(
                DistillationSettings("hard", teacher=str(tmp_path)), network, normalization, classes
            )
