"""Mixup and CutMix with label smoothing: the images, the targets and the loss of timm."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from modules import images_in, trainer
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy

from cait import seeds


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_mixing_and_smoothing_are_timms(mixed_root, mode):
    data = images_in(mixed_root, mix_mode=mode, seed=5)
    data.setup("fit")
    data.trainer = trainer()
    data.trainer.training = True
    batch = data.trainer.fit_loop.epoch_loop.batch_progress.current
    timms = Mixup(0.8, 1.0, switch_prob=0.5, mode=mode, label_smoothing=0.1, num_classes=3)
    for step in range(12):
        batch.ready = step
        images = torch.randn(4, 3, 32, 32)
        labels = torch.randint(0, 3, (4,))
        mixed, targets = data.on_after_batch_transfer((images.clone(), labels), 0)
        np.random.seed(seeds.batch_mixing(5, 0, step, 0))
        timms_images, timms_targets = timms(images.clone(), labels)
        assert torch.equal(mixed, timms_images)
        smoothed = 0.9 * targets + 0.1 / 3
        assert torch.allclose(smoothed, timms_targets, rtol=0, atol=1e-6)
        logits = torch.randn(4, 3)
        loss = F.cross_entropy(logits, targets, label_smoothing=0.1)
        assert torch.isclose(loss, SoftTargetCrossEntropy()(logits, timms_targets), rtol=1e-6)
