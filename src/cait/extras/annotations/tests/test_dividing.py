"""Folds and groups are scikit-learn's, and nothing that validates is trained on."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from class_folders import write_files
from harness import over_table
from label_tables import names, write_table
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

from cait.data.source import open_source
from cait.data.table import write_held_out
from cait.extras.annotations.folds import GroupFolds

SCENES = np.array(
    sorted(f"{label}/s{number // 4}_{number}.png" for label in "abc" for number in range(40))
)
"""Images of three classes in ten scenes."""
LABELS = [path[0] for path in SCENES]
SETS = ["rare", "rare", *(f"{label};all" for label in LABELS[2:])]
SPLITS = ["test", *["train"] * 3, "val", "test", "train", "train", "val", "train"] * 12
BY_SCENE = r"(x)|(s\d+)_"


def scene_of(path):
    return path.partition("_")[0].partition("/")[2]


def scenes_in(images):
    return {scene_of(path) for path in names(images)}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def scenes():
    """The images in the working folder, and tables of them that say more and less."""
    write_files(Path(), SCENES)
    write_table("plain.csv", "path,label", SCENES, LABELS)
    write_table("grouped.csv", "path,label,group", SCENES, LABELS, map(scene_of, SCENES))
    write_table("marked.csv", "path,label,split", SCENES, LABELS, SPLITS)
    write_table("several.csv", "path,label", SCENES, ["rare", "a;rare", *SETS[2:]])


@pytest.mark.parametrize(
    ("settings", "splitter", "labels"),
    [
        ({}, StratifiedKFold, LABELS),
        (dict(group_by=BY_SCENE), StratifiedGroupKFold, LABELS),
        (dict(labels="grouped.csv"), StratifiedGroupKFold, LABELS),
        # by the set of an image's labels, and rare sets count as one
        (dict(labels="several.csv", multi_label=True), StratifiedKFold, SETS),
    ],
)
def test_folds_are_scikit_learns(settings, splitter, labels, scenes):
    source = open_source(".", folds=4, fold=3, **settings)
    folds = splitter(4, shuffle=True, random_state=0)
    *_, (train, val) = folds.split(SCENES, labels, [*map(scene_of, SCENES)])
    assert names(source.train) == [*SCENES[train]]
    assert names(source.val) == [*SCENES[val]]


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


def test_each_image_is_in_one_fold_and_test_images_are_in_none(scenes):
    validated = Counter()
    for fold in range(3):
        source = open_source(".", labels="marked.csv", folds=3, fold=fold)
        validated.update(names(source.val))
        assert names(source.test) == [*SCENES[::5]]
    assert validated == Counter({*SCENES} - {*SCENES[::5]})


def test_an_image_that_is_marked_to_validate_never_trains(scenes):
    """Although a run goes on with the list of those that it has validated on."""
    table = Path("marked.csv")
    before = open_source(".", labels="marked.csv")
    write_held_out(Path("held.csv"), before.val, Path(), before.label_names)
    table.write_text(table.read_text().replace("train", "val", 1))
    after = open_source(".", labels="marked.csv", val_list="held.csv")
    assert [*after.val] == [*before.val]
    assert [*after.train] == [*before.train][1:]


@over_table(__file__, "resumed")
def test_a_run_that_goes_on_divides_nothing_and_has_the_same_images(settings, scenes):
    """In the same order, with the list of what it held out alone."""
    first, again = (open_source(".", **settings) for _ in range(2))
    write_held_out(Path("held.csv"), first.val, Path(), first.label_names)
    again.choose = None
    again.keep(Path("held.csv"))
    assert [*again.train] == [*first.train]
    assert [*again.val] == [*first.val]


# Groups


@pytest.mark.parametrize("groups", [2, 4, 30])
def test_as_many_groups_are_held_out_as_there_are(groups):
    """Though a tenth cannot be had; each class keeps training images."""
    write_files(Path(), [f"{number % 7}/s{number % groups}_{number}.png" for number in range(180)])
    source = open_source(".", group_by=BY_SCENE)
    scenes = scenes_in(source.val)
    assert not scenes & scenes_in(source.train)
    assert len(scenes) == max(1, groups // 10)
    assert {*source.train.labels} == {*range(7)}


def test_a_class_of_few_groups_is_validated_too():
    """Though no fold has all classes: the images of 0 are one and the rest, those of 1 five groups, others 20."""
    for number in range(144):
        scenes = [int(number > 0), number % 5, *[number % 20] * 8]
        write_files(Path(), [f"{n}/s{n}{scene}_{number}.png" for n, scene in enumerate(scenes)])
    source = open_source(".", group_by=BY_SCENE)
    train, val = np.bincount(source.train.labels), np.bincount(source.val.labels)
    assert val[0] == 1
    assert (val > 0).all()
    assert (val < train).all()
    assert val.sum() < 0.15 * 1440


@over_table(__file__, "few")
def test_some_are_held_out_of_few_images(several, images):
    """Where each class has fewer images than the folds of a tenth, or the whole table has."""
    labels = ["0", "1", "2", "3", "4"] * images
    if several:
        labels += ["0;1;2;3;4"] * 3
    paths = [f"{number}.png" for number in range(len(labels))]
    write_files(Path(), paths)
    write_table("t.csv", "path,label,group", paths, labels, paths)
    source = open_source(".", labels="t.csv", multi_label=several)
    assert 0 < len(source.val) < len(source.train)
