"""Folds and groups are scikit-learn's, and nothing that validates is trained on."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from class_folders import write_files
from label_tables import below, write_table
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

from cait.data.source import open_source
from cait.data.table import write_held_out
from cait.extras.annotations.folds import GroupFolds

SCENES = sorted(f"{label}/s{number // 4}_{number}.png" for label in "abc" for number in range(40))
"""Images of three classes in ten scenes."""
BY_SCENE = r"(x)|(s\d+)_"


def scene_of(path):
    return path.partition("_")[0].partition("/")[2]


def opened(root, paths, **settings):
    return open_source(str(write_files(root, paths)), **settings)


@pytest.mark.parametrize(
    ("settings", "splitter"),
    [
        ({}, StratifiedKFold),
        (dict(group_by=BY_SCENE), StratifiedGroupKFold),
        (dict(labels="t.csv"), StratifiedGroupKFold),
    ],
)
def test_folds_are_scikit_learns(settings, splitter, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [(path, path[0], scene_of(path)) for path in SCENES]
    write_table(Path("t.csv"), "path,label,group", rows)
    source = opened(tmp_path, SCENES, folds=4, fold=3, **settings)
    labels = [path[0] for path in SCENES]
    scenes = [scene_of(path) for path in SCENES]
    folds = splitter(4, shuffle=True, random_state=0).split(SCENES, labels, scenes)
    train, val = list(folds)[3]
    assert below(source.train, tmp_path) == [SCENES[row] for row in train]
    assert below(source.val, tmp_path) == [SCENES[row] for row in val]


def test_folds_of_several_labels_are_stratified_by_their_set_and_rare_sets_count_as_one(tmp_path):
    sets = ["rare", "a;rare", *(f"{path[0]};all" for path in SCENES[2:])]
    table = write_table(tmp_path / "t.csv", "path,label", zip(SCENES, sets, strict=True))
    source = opened(tmp_path, SCENES, labels=table, multi_label=True, folds=4, fold=3)
    labels = ["rare", "rare", *sets[2:]]
    folds = StratifiedKFold(4, shuffle=True, random_state=0).split(SCENES, labels)
    _, val = list(folds)[3]
    assert below(source.val, tmp_path) == [SCENES[row] for row in val]


@pytest.mark.parametrize("seed", range(12))
def test_folds_of_groups_weighed_at_once_are_scikit_learns(seed):
    draw = np.random.default_rng(seed)
    groups = draw.integers(0, 12 + 5 * seed, 300)
    labels = groups % (1 + seed) if seed % 2 else draw.integers(0, 1 + seed, 300)
    settings = dict(n_splits=2 + seed % 9, shuffle=True, random_state=0)
    folds = GroupFolds(**settings).split(labels, labels, groups)
    expected = StratifiedGroupKFold(**settings).split(labels, labels, groups)
    for (_, ours), (_, theirs) in zip(folds, expected, strict=True):
        assert np.array_equal(ours, theirs)


# What is marked in a table


def marked_table(file):
    """Every fifth is a test image, every fourth of the others validates."""
    splits = ["test" if n % 5 == 0 else "val" if n % 4 == 0 else "train" for n in range(120)]
    rows = [(path, path[0], split) for path, split in zip(SCENES, splits, strict=True)]
    return write_table(file, "path,label,split", rows)


def test_each_image_is_in_one_fold_and_test_images_are_in_none(tmp_path):
    table = marked_table(tmp_path / "t.csv")
    validated = Counter()
    for fold in range(3):
        source = opened(tmp_path, SCENES, labels=table, folds=3, fold=fold)
        validated.update(below(source.val, tmp_path))
        assert below(source.test, tmp_path) == SCENES[::5]
    assert validated == Counter({*SCENES} - {*SCENES[::5]})


def test_an_image_that_is_marked_to_validate_never_trains(tmp_path):
    """Although a run goes on with the list of those that it has validated on."""
    table = Path(marked_table(tmp_path / "t.csv"))
    before = opened(tmp_path, SCENES, labels=str(table))
    listed = write_table(
        tmp_path / "held.csv", "path", [[path] for path in below(before.val, tmp_path)]
    )
    table.write_text(table.read_text().replace("train", "val", 1))
    after = opened(tmp_path, SCENES, labels=str(table), val_list=listed)
    assert [*after.val] == [*before.val]
    assert [*after.train] == [*before.train][1:]


@pytest.mark.parametrize(
    "settings",
    [
        dict(labels="marked.csv"),
        dict(labels="plain.csv"),  # a share of each class validates
        dict(labels="marked.csv", folds=3),
        dict(group_by=BY_SCENE, folds=4),
    ],
)
def test_a_run_that_goes_on_divides_nothing_and_has_the_same_images(
    settings, tmp_path, monkeypatch
):
    """In the same order, with the list of what it held out alone."""
    monkeypatch.chdir(tmp_path)
    marked_table(Path("marked.csv"))
    write_table(Path("plain.csv"), "path,label", [(path, path[0]) for path in SCENES])
    first, again = (opened(tmp_path, SCENES, **settings) for _ in range(2))
    write_held_out(Path("held.csv"), first.val, tmp_path, first.label_names)
    again.choose = None
    again.keep(Path("held.csv"))
    assert [*again.train] == [*first.train]
    assert [*again.val] == [*first.val]


# Groups


@pytest.mark.parametrize("groups", [2, 4, 30])
def test_as_many_groups_are_held_out_as_there_are(groups, tmp_path):
    """Though a tenth cannot be had; each class keeps training images."""
    paths = [f"{number % 7}/s{number % groups}_{number}.png" for number in range(180)]
    source = opened(tmp_path, paths, group_by=BY_SCENE)
    train, val = below(source.train, tmp_path), below(source.val, tmp_path)
    scenes = {scene_of(path) for path in val}
    assert not scenes & {scene_of(path) for path in train}
    assert len(scenes) == max(1, groups // 10)
    assert {*source.train.labels} == {*range(7)}


def test_a_class_of_few_groups_is_validated_too(tmp_path):
    """Though no fold has all classes: the images of 0 are one and the rest, those of 1 five groups, others 20."""
    paths = []
    for number in range(144):
        paths.append(f"0/s0{int(number > 0)}_{number}.png")
        paths.append(f"1/s1{number % 5}_{number}.png")
        paths += [f"{label}/s{label}{number % 20}_{number}.png" for label in range(2, 10)]
    source = opened(tmp_path, paths, group_by=BY_SCENE)
    train, val = np.bincount(source.train.labels), np.bincount(source.val.labels)
    assert val[0] == 1
    assert (val > 0).all()
    assert (val < train).all()
    assert len(source.val) / len(paths) < 0.15


@pytest.mark.parametrize(("several", "images"), [(False, 6), (True, 1)])
def test_some_are_held_out_of_few_images(several, images, tmp_path):
    """Where each class has fewer images than the folds of a tenth, or the whole table has."""
    rows = [(f"{n}{label}.png", label) for label in "01234" for n in range(images)]
    if several:
        rows += [(f"{number}.png", "0;1;2;3;4") for number in range(3)]
    grouped = [(path, label, path) for path, label in rows]
    table = write_table(tmp_path / "t.csv", "path,label,group", grouped)
    paths = [path for path, _ in rows]
    source = opened(tmp_path, paths, labels=table, multi_label=several)
    assert 0 < len(source.val) < len(source.train)
