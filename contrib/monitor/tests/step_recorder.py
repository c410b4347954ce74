"""All that a batch's gradients follow from; given to runs as a callback."""

from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback


class StepRecorder(Callback):
    """What enters a batch's step, in `<folder>/<rank>-<batch>.pt`, and the weights after the step."""

    def __init__(self, folder: str):
        self.folder = Path(folder)

    def on_fit_start(self, trainer, pl_module):
        self.folder.mkdir(exist_ok=True)
        self.batch = 0

        def before(network, arguments):
            if network.training:
                self.record = dict(
                    images=arguments[0].clone(),
                    weights={name: tensor.clone() for name, tensor in network.state_dict().items()},
                    generator=torch.get_rng_state(),
                )

        pl_module.model.register_forward_pre_hook(before)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, *_):
        record = self.record | dict(targets=batch[1], after=pl_module.model.state_dict())
        torch.save(record, self.folder / f"{trainer.global_rank}-{self.batch}.pt")
        self.batch += 1
