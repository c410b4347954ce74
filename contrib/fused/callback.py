"""The kernels in a run: a callback, apart from `backend`, because the benchmarks on a GPU have no Lightning."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from contrib.fused.backend import use


class Fused(Callback):
    """Train and validate with the kernels. Checkpoints stay as they are: eval and predict run without them."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        use(pl_module)
