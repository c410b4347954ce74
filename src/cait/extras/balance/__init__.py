"""Draw the images of small classes more often: --data.balance."""

from dataclasses import dataclass
from typing import Any, Literal

from cait.errors import UserError
from cait.settings import Group

GROUPS = {"data": "cait.extras.balance:Balance"}


@dataclass(frozen=True)
class Balance(Group):
    """How often the images of a class are drawn."""

    balance: Literal["sqrt", "full"] | None = None
    """Draw the images of small classes more often, and those of large classes less. "full" gives all classes the same
    share of an epoch. "sqrt" gives each class a share in proportion to the square root of its number of images."""

    def train_order(self, data: Any) -> Any:
        """The order of a data module's training images, see `cait.plugins.KINDS`; None leaves it to the others.

        Raises UserError if an image may have several classes, or the source does not know them.
        """
        if self.balance is None:
            return None
        if data.task is not None:
            raise UserError(
                "data.balance is for one class per image; for several give --model.class_weights balanced"
            )
        from cait.extras.balance.order import Balanced

        return Balanced(data.train_labels, self.balance)
