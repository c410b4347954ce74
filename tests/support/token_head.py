"""What timm's distillation takes for a student, of any network."""

from collections.abc import Sequence

from torch import Tensor, nn


class TokenHead(nn.Module):
    """A CaiT as timm's task wants its student: the distillation head is the class head, as in the release."""

    def __init__(
        self, student: nn.Module, num_classes: int, mean: Sequence[float], std: Sequence[float]
    ):
        super().__init__()
        self.student = student
        self.num_classes, self.in_chans, self.pretrained_cfg = (
            num_classes,
            3,
            dict(mean=mean, std=std),
        )

    def set_distilled_training(self, enable: bool):
        pass

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.student(images)
        return logits, logits
