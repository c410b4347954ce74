"""Further parts that the configuration names: a metric and a callback."""

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torchmetrics.classification import MulticlassRecall


class WorstRecall(MulticlassRecall):
    """The recall of the class that is recognized worst; `val/worst` in metrics.csv."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes, average="none")

    def compute(self) -> Tensor:
        return super().compute().min()


class Announce(Callback):
    """Say when the validation accuracy passes `percent` for the first time."""

    def __init__(self, percent: float = 90.0) -> None:
        self.percent = percent
        self.has_passed = False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        accuracy = trainer.callback_metrics.get("val/acc1", 0.0)
        if accuracy > self.percent and not self.has_passed:
            self.has_passed = True
            print(f"more than {self.percent:g} % after {trainer.global_step} steps")

    def state_dict(self) -> dict[str, bool]:
        """Saved with the run, so that a resumed run does not say it twice."""
        return {"has_passed": self.has_passed}

    def load_state_dict(self, state_dict: dict[str, bool]) -> None:
        self.has_passed = state_dict["has_passed"]
