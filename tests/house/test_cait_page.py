"""docs/cait.md explains the network in plain PyTorch: what it computes is what the source computes."""

import json
import re
from typing import Any

import pytest
import torch
from harness import REPO

import cait
from cait.model.residual import DropPath
from cait.train.losses import DistillationSettings

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names that the page's code defines; it runs the whole network beside that of the source."""
    names: dict[str, Any] = {}
    for code in BLOCK.findall((REPO / "docs/cait.md").read_text()):
        exec(code, names)
    return names


def trained(name: str, **fields: Any) -> torch.nn.Module:
    """A network whose λ, biases and embeddings are not at their start, so that each of them counts."""
    network = cait.create_model(name, img_size=64, num_classes=7, depth=2, **fields)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return network


@pytest.mark.parametrize(("name", "heads"), [("xxs24", 4), ("s24", 8)])
def test_the_network_of_the_page_is_the_one_of_the_source(
    page: dict[str, Any], name: str, heads: int
) -> None:
    torch.manual_seed(0)
    network, images = trained(name).eval(), torch.randn(3, 3, 64, 64)
    weights = network.state_dict()
    torch.testing.assert_close(
        page["cait"](images, weights, heads), network(images), rtol=1e-3, atol=1e-3
    )


def test_stochastic_depth_of_the_page_is_that_of_the_source(page: dict[str, Any]) -> None:
    branch, drop_path = torch.randn(64, 5, 3), DropPath(0.4).train()
    torch.manual_seed(1)
    expected = drop_path(branch)
    torch.manual_seed(1)
    torch.testing.assert_close(page["drop_path"](branch, 0.4), expected)


def test_distillation_of_the_page_is_that_of_the_source(page: dict[str, Any]) -> None:
    logits, teacher, labels = torch.randn(8, 5), torch.randn(8, 5), torch.randint(5, (8,))
    settings = DistillationSettings(distillation="hard")
    expected = settings.distilled_loss(
        torch.nn.functional.cross_entropy(logits, labels), logits, teacher
    )
    torch.testing.assert_close(page["hard_distillation"](logits, labels, teacher), expected)


def test_the_notebook_has_the_page_and_its_code() -> None:
    page, notebook = (
        (REPO / "docs/cait.md").read_text(),
        json.loads((REPO / "docs/cait.ipynb").read_text()),
    )
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code == [block.rstrip("\n") for block in BLOCK.findall(page)]
