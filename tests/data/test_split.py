"""No image on both sides: files, bytes, a folder that grows, what runs write beside the images."""

import csv
import os
import random
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

CLASSES = ["a", "b", "logs"]


def fill(root: Path, draw: random.Random, start: int = 0) -> None:
    """Add files of a few sizes to three classes; some are copies, links or hard links of files of any class."""
    there = sorted(root.glob("*/*"))
    for label in CLASSES:
        (root / label).mkdir(parents=True, exist_ok=True)
        for number in range(start, start + draw.randrange(8, 40)):
            path = root / label / f"{number:03}.png"
            kind, other = draw.random(), draw.choice(there) if there else None
            if other and kind < 0.1:
                shutil.copy(other, path)
            elif other and kind < 0.2:
                draw.choice([path.symlink_to, path.hardlink_to])(other.resolve())
            else:
                path.write_bytes(b"same" * draw.choice([1, 2000]) + draw.randbytes(9) + b"same" * 2000)
            there.append(path)


def of(samples: object, root: Path) -> dict[str, bytes]:
    """Bytes of the images by their path below the root."""
    return {os.path.relpath(path, root): Path(path).read_bytes() for path, _ in samples}  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(8))
def test_no_image_is_on_both_sides_of_a_folder_that_grows(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw, root, fraction = random.Random(seed), tmp_path / "images", (0.1, 0.2, 0.3)[seed % 3]
    fill(root, draw)
    every = sorted(root.glob("*/*"))
    source = open_source(str(root), val_fraction=fraction)
    train, val = of(source.train, root), of(source.val, root)
    assert not {*train.values()} & {*val.values()}
    for label in CLASSES:  # as many as ever, and every class on both sides
        count = len([path for path in every if path.parent.name == label])
        assert len([path for path in val if path.startswith(f"{label}/")]) == max(1, round(count * fraction))
        assert any(path.startswith(f"{label}/") for path in train)
    left = {str(path.relative_to(root)): path.read_bytes() for path in every}
    copies = left.keys() - train.keys() - val.keys()
    assert all(left[path] in val.values() for path in copies)
    told = f"{len(copies)} of {len(every) - len(val)} training images are left out, because a validation image has"
    assert (told in capsys.readouterr().err) is bool(copies)

    (tmp_path / "held.csv").write_text("\n".join(["path", *val]))
    fill(root, draw, start=100)
    folds = [dict(folds=3, fold=fold) for fold in range(3)]
    for settings in (dict(val_list=str(tmp_path / "held.csv")), *folds):
        grown = open_source(str(root), **settings)  # type: ignore[arg-type]
        of_train, of_val = of(grown.train, root), of(grown.val, root)
        assert not {*of_train.values()} & {*of_val.values()}
        if "val_list" in settings:
            assert of_val == val
            new = [path for path in root.glob("*/1??.png") if path.read_bytes() not in val.values()]
            assert {str(path.relative_to(root)) for path in new} <= of_train.keys()


def test_a_class_of_copies_alone_is_kept_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a/1", "a/2", "b/1", "b/2"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.png").write_bytes(name[:1].encode())
    assert len(open_source(str(tmp_path)).train) == 2
    assert (
        "2 of 2 training images are copies of validation images; their class has no others" in capsys.readouterr().err
    )


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
    settings = ["--data.root=.", "--data.batch_size=16", "--trainer.max_epochs=1", "--data.num_workers=0"]
    settings += ["--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1"]
    settings += [f"--trainer.default_root_dir={logs}"] if logs != "logs" else []
    main(["fit", *SMALL, *settings, "--run_name=a"])
    written = (f"{logs}/a/drawn.png", f"{logs}/drawn.png", f"{logs}/many/fold-0/.lock", "__pycache__/my_net.pyc")
    for place in written:
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(next((digits_root / "val/0").iterdir()), place)
    held = Path(f"{logs}/a/validation.csv").read_text()
    with open(f"{logs}/a/validation.csv", newline="") as lines:
        assert all(Path(row["path"]).is_file() for row in csv.DictReader(lines))
    main(["resume", f"{logs}/a", "--trainer.max_epochs=2"])
    main(["fit", *SMALL, *settings, "--run_name=b", f"--data.val_list={logs}/a/validation.csv"])
    assert Path(f"{logs}/a/validation.csv").read_text() == held
    assert sorted(Path(f"{logs}/b/validation.csv").read_text().splitlines()) == sorted(held.splitlines())
    assert not [path for path, _ in scan_flat(Path()) if path.startswith(logs)]


def test_a_run_validates_on_what_it_has_held_out(
    here: Path, digits_root: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def add(numbers: slice) -> None:
        for label in "0123":
            Path("grow", label).mkdir(parents=True, exist_ok=True)
            for path in sorted((digits_root / "train" / label).iterdir())[numbers]:
                shutil.copy(path, Path("grow", label))

    add(slice(30))
    settings = ["--data.root=grow", "--data.batch_size=16", "--trainer.max_epochs=1", "--data.num_workers=0"]
    main(["fit", *SMALL, *settings, "--run_name=run"])
    held = Path("logs/run/validation.csv").read_text()
    add(slice(30, 45))
    more = ["resume", "run", "--trainer.max_epochs=2"]
    for given, words in (
        (more, "training pictures was 108, is 168; to continue anyway add --data.check_resume false"),
        ([*more, "--data.val_fraction=0.5", "--data.check_resume=false"], "leave out --data.val_fraction, which was"),
        (["eval", "run", "--data.val_fraction=0.5"], "--data.val_fraction does nothing where logs/run says"),
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
    sizes = dict(img_size=8, num_classes=3, fields=dict(embed_dim=16, depth=1, num_heads=2, patch_size=4))
    network = NetworkSettings("xxs24", **sizes)
    normalization = ([0.5] * 3, [0.5] * 3)
    built = network.build_network().eval()
    checkpoint = {
        "pytorch-lightning_version": "2.6.6",
        "global_step": 1,
        "state_dict": {f"model.{key}": value for key, value in built.state_dict().items()},
        "hyper_parameters": {"name": "xxs24", **sizes, "mean": normalization[0], "std": normalization[1]},
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
        with pytest.raises(UserError, match="takes 4 channels, the student 1: give the student"):  # gray is RGB
            load_teacher(settings, network, ([0.5], [0.5]), classes)
        checkpoint["hyper_parameters"]["task"] = "several"
        torch.save(checkpoint, path)
        with pytest.raises(UserError, match="gives an image several classes, the data one"):
            load_teacher(settings, network, normalization, classes)
        with pytest.raises(UserError, match=r"the teacher .* is a folder: name a checkpoint"):
            load_teacher(DistillationSettings("hard", teacher=str(tmp_path)), network, normalization, classes)
