"""The data module without the command line: its batches, what it holds out, and which checkpoints it takes."""

from types import SimpleNamespace

import pytest
import torch
from harness import over_table
from modules import images_in

from cait.data.datamodule import ACCUMULATED, BATCH
from cait.data.dataset import NO_LABEL
from cait.errors import UserError


@pytest.mark.filterwarnings("error")
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
    assert data.class_names == ["cat", "dog", "owl"]
    data.load_state_dict(state)
    with pytest.raises(UserError, match="unknown: bat"):
        images_in(mixed_root).load_state_dict(state)


def test_each_fact_alone_refuses_a_checkpoint(two_classes):
    data = in_training(two_classes, backend="timm")
    saved = data.state_dict()
    data.load_state_dict(saved)
    names = saved["depends_on"].keys() | saved["preprocessing"].keys()
    for name in names - {BATCH, ACCUMULATED}:  # which make the images of a step, see below
        state = data.state_dict()
        part = "depends_on" if name in saved["depends_on"] else "preprocessing"
        state[part][name] = "another"
        with pytest.raises(UserError, match=f"{name} was another"):
            data.load_state_dict(state)


@over_table(__file__, "others")
def test_a_run_of_other_settings_is_not_resumed_unless_it_is_asked_for(case, settings, two_classes):
    state = in_training(two_classes).state_dict()
    with pytest.raises(UserError, match=case):
        in_training(two_classes, **settings).load_state_dict(state)
    in_training(two_classes, **settings, check_resume=False).load_state_dict(state)


def test_the_images_of_a_step_may_be_divided_otherwise(two_classes):
    state = in_training(two_classes).state_dict()
    in_training(two_classes, batch_size=2, accumulated=2).load_state_dict(state)
