"""The data module without the command line: its batches, what it holds out, and which checkpoints it takes."""

import dataclasses
import hashlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from modules import images_in

from cait.data.datamodule import PREPARATION
from cait.data.dataset import NO_LABEL
from cait.errors import UserError


@pytest.mark.filterwarnings("error")
def test_images_of_every_mode_go_through_the_whole_recipe(mixed_root):
    data = images_in(mixed_root, repeats=1)
    data.setup("fit")
    images = torch.cat([images for images, _ in data.train_dataloader()])
    assert images.shape == (36, 3, 32, 32)
    assert images.isfinite().all()
    labels = torch.cat([labels for _, labels in data.val_dataloader()])
    assert labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5


def test_a_process_without_an_image_joins_in_adding_up_the_metrics(mixed_root):
    data = images_in(mixed_root)
    data.setup("validate")
    data.trainer = SimpleNamespace(global_rank=15, world_size=16, num_devices=16)
    [(images, labels)] = data.val_dataloader()
    assert labels.tolist() == [NO_LABEL]
    assert not images.any()
    with pytest.raises(UserError, match="16 processes"):
        data.predict_dataloader()


# Which checkpoints it takes


def in_training(root, accumulated=1, **settings):
    data = images_in(root, **settings)
    data.trainer = SimpleNamespace(
        training=True,
        global_rank=0,
        world_size=1,
        accumulate_grad_batches=accumulated,
        callbacks=[],
    )
    return data


def test_a_checkpoint_holds_the_classes_as_they_were_first_listed(mixed_root):
    data = images_in(mixed_root)
    by_another_path = images_in(f"{mixed_root.parent}/./mixed/").state_dict()
    assert data.num_classes == 3  # the model's head is made
    (mixed_root / "train/bat").mkdir()
    data.setup("fit")
    state = data.state_dict()
    assert state == by_another_path
    assert state["class_names"] == data.class_names == ["cat", "dog", "owl"]
    paths = [path for path, _ in data.train_images.samples]
    names = [f"{Path(path).relative_to(mixed_root)}\n" for path in paths]
    digest = hashlib.sha256("".join(names).encode()).hexdigest()
    assert state["depends_on"]["digest of the training pictures' names"] == digest[:16]
    data.load_state_dict(state)
    with pytest.raises(UserError, match="unknown: bat"):
        images_in(mixed_root).load_state_dict(state)


def test_classes_may_be_called_otherwise(mixed_root):
    data = images_in(mixed_root, class_names=["Katze", "Hund", "Eule"])
    data.setup("fit")
    assert data.class_names == ["Katze", "Hund", "Eule"]


FACTS = [
    "class of the data module",
    "seed",
    "repeats",
    "pixels by",
    "training pictures",
    "digest of the training pictures' names",
    "validation pictures",
    "digest of the validation pictures' names",
    "order of the images",
    *(field.name for field in dataclasses.fields(PREPARATION)),
]


@pytest.mark.parametrize("name", FACTS)
def test_each_fact_alone_refuses_a_checkpoint(name, two_classes):
    data = in_training(two_classes, backend="timm")
    state = data.state_dict()
    data.load_state_dict(state)
    facts = state["depends_on"] if name in state["depends_on"] else state["preprocessing"]
    facts[name] = "another"
    with pytest.raises(UserError, match=f"{name} was another"):
        data.load_state_dict(state)


def test_no_fact_of_a_checkpoint_is_left_out_above(two_classes):
    state = images_in(two_classes).state_dict()
    size = {"images a batch, over all processes", "batches accumulated, by epoch"}
    assert {*state["depends_on"], *state["preprocessing"]} == {*FACTS} | size


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        (dict(seed=7), "seed"),
        (dict(crop_pct=0.5), "crop_pct"),
        (dict(batch_size=8), "images a step"),
        (dict(accumulated=2), "images a step"),
        (dict(train_split="val", val_split="train"), "training pictures"),
        (dict(val_split="train"), "validation pictures"),
    ],
)
def test_a_run_of_other_settings_is_not_resumed_unless_it_is_asked_for(settings, fact, two_classes):
    state = in_training(two_classes).state_dict()
    with pytest.raises(UserError, match=fact):
        in_training(two_classes, **settings).load_state_dict(state)
    in_training(two_classes, **settings, check_resume=False).load_state_dict(state)


def test_the_images_of_a_step_may_be_divided_otherwise(two_classes):
    state = in_training(two_classes).state_dict()
    in_training(two_classes, batch_size=2, accumulated=2).load_state_dict(state)
