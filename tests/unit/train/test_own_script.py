"""A script of one's own: the module takes its sizes from the data, and a plain Trainer resumes it to the bit."""

import pytest
import torch
from modules import FIELDS, SavesAt, images_in, train, trainer
from same import same

import cait
from cait.train.callbacks import EMA, StepSeed


def module(**settings):
    return cait.CaiTModule(**dict(fields=FIELDS, lr_base_size=None, warmup_epochs=1) | settings)


def test_a_module_takes_its_sizes_from_the_data_and_keeps_them(digits_root, tmp_path):
    net, average, path = module(), EMA(0.9), tmp_path / "x.ckpt"
    with pytest.raises(AttributeError, match="img_size and num_classes"):
        net(torch.zeros(1, 3, 8, 8))
    data = images_in(digits_root, img_size=8, mean=[0.1, 0.2, 0.3])
    train(net, path, data, callbacks=[average], max_steps=2)
    for network in (net, average.average):
        assert network(torch.zeros(2, 3, 8, 8)).shape == (2, 10)
    assert net.hparams_initial == net.hparams
    assert (net.hparams.img_size, net.hparams.num_classes) == (8, 10)
    assert [*net.hparams.mean] == [0.1, 0.2, 0.3]
    image = next((digits_root / "val/7").iterdir())
    again = cait.CaiTModule.load_from_checkpoint(path, weights_only=True)
    loaded = cait.load(path, raw=True)
    for other in (again, loaded):
        assert same(other.state_dict(), net.state_dict())
        assert other.predict(image) == net.predict(image)
    letters = [*"abcdefghij"]
    train(loaded, images=images_in(digits_root, img_size=8, class_names=letters), max_steps=1)
    assert loaded.predict(image, top_k=1)[0]["class"] in letters


def test_a_plain_trainer_resumes_in_the_middle_of_an_epoch_to_the_bit(digits_root, tmp_path):
    path = tmp_path / "x.ckpt"

    def weights(start=None):
        callbacks = [StepSeed(0)] if start else [StepSeed(0), SavesAt(4, path)]
        limits = dict(limit_train_batches=3, limit_val_batches=1)
        fit = trainer(callbacks=callbacks, enable_checkpointing=not start, **limits)
        net = module(drop_path_rate=0.3)
        fit.fit(net, images_in(digits_root, img_size=8, auto_augment="3a"), ckpt_path=start)
        assert fit.global_step == 6
        return net.state_dict()

    torch.manual_seed(0)
    assert same(weights(), weights(path))
