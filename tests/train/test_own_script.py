"""A script of one's own: the module takes its sizes from the data, and a plain Trainer resumes it to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from modules import FIELDS, SavesAt, trainer

import cait
from cait.errors import UserError
from cait.train.callbacks import EMA, StepSeed

PLAIN = dict(repeats=1, auto_augment=None, erase_prob=0.0, mixup=0.0, cutmix=0.0, num_workers=0)


def data(root: Path, **settings: Any) -> cait.ImageNetDataModule:
    return cait.ImageNetDataModule(
        **(dict(root=str(root), img_size=8, batch_size=256) | PLAIN | settings)
    )


def module(**settings: Any) -> cait.CaiTModule:
    return cait.CaiTModule(
        **(dict(fields=FIELDS, lr=1e-3, lr_base_size=None, drop_path_rate=0.3) | settings)
    )


def test_a_module_takes_its_sizes_from_the_data(digits_root: Path, tmp_path: Path) -> None:
    net = module()
    with pytest.raises(
        AttributeError, match="built when a Trainer gets data; or give img_size and num_classes"
    ):
        net(torch.zeros(1, 3, 8, 8))
    average = EMA(0.9)
    run = trainer(callbacks=[average], max_steps=2)
    run.fit(net, data(digits_root, mean=[0.1, 0.2, 0.3]))
    assert net(torch.zeros(2, 3, 8, 8)).shape == (2, 10)
    assert average.average(torch.zeros(2, 3, 8, 8)).shape == (2, 10)
    assert net.hparams_initial == net.hparams
    run.save_checkpoint(tmp_path / "x.ckpt")
    saved = torch.load(tmp_path / "x.ckpt", weights_only=True)["hyper_parameters"]
    assert (saved["img_size"], saved["num_classes"], list(saved["mean"])) == (
        8,
        10,
        [0.1, 0.2, 0.3],
    )
    again = cait.CaiTModule.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    loaded = cait.load(tmp_path / "x.ckpt", raw=True)
    for key, value in net.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
        assert torch.equal(value, loaded.state_dict()[key]), key
    image = next((digits_root / "val/7").iterdir())
    assert again.predict(image) == loaded.predict(image) == net.predict(image)
    letters = [*"abcdefghij"]
    trainer(max_steps=1).fit(loaded, data(digits_root, mean=[0.1, 0.2, 0.3], class_names=letters))
    assert loaded.predict(image, top_k=1)[0]["class"] in letters


# with both the network is built before the data are known
@pytest.mark.parametrize("others", [{}, {"img_size": 8}])
def test_other_sizes_than_the_datas_are_refused(others: dict[str, int], digits_root: Path) -> None:
    with pytest.raises(
        UserError, match=r"^the module has num_classes 1000, the data has 10: leave it out"
    ):
        trainer(max_steps=1).fit(module(num_classes=1000, **others), data(digits_root))


def test_a_plain_trainer_resumes_in_the_middle_of_an_epoch_to_the_bit(
    digits_root: Path, tmp_path: Path
) -> None:
    saves = SavesAt(8, tmp_path / "x.ckpt")  # in the middle of the second epoch
    whole, rest = module(warmup_epochs=1), module(warmup_epochs=1)
    fit = trainer(callbacks=[StepSeed(0), saves], max_epochs=3, enable_checkpointing=True)
    fit.fit(whole, data(digits_root, auto_augment="3a"))
    resumed = trainer(callbacks=[StepSeed(0)], max_epochs=3)
    resumed.fit(rest, data(digits_root, auto_augment="3a"), ckpt_path=saves.path)
    assert resumed.global_step == 15
    for key, value in whole.state_dict().items():
        assert torch.equal(value, rest.state_dict()[key]), key


def test_what_is_public_is_listed() -> None:
    assert dir(cait) == sorted(
        [
            "CONFIGS",
            "CaiTModule",
            "ImageNetDataModule",
            "create_model",
            "fit",
            "load",
            "__version__",
        ]
    )
    assert all(getattr(cait, name) for name in dir(cait))
