"""docs/cait.md explains the network in plain PyTorch: what it computes is what the source computes."""

import json
import re

import pytest
import torch
from harness import REPO

import cait
from cait.model.residual import DropPath
from cait.train.losses import DistillationSettings

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def page():
    """The names that the page's code defines; it runs the whole network beside that of the source."""
    names = {}
    for code in BLOCK.findall((REPO / "docs/cait.md").read_text()):
        exec(code, names)
    return names


@pytest.mark.parametrize(("name", "heads"), [("xxs24", 4), ("s24", 8)])
def test_the_network_of_the_page_is_the_one_of_the_source(page, name, heads):
    torch.manual_seed(0)
    network = cait.create_model(name, img_size=64, num_classes=7, depth=2).eval()
    for parameter in network.parameters():  # so that λ, biases and embeddings count
        torch.nn.init.normal_(parameter, std=0.2)
    images = torch.randn(3, 3, 64, 64)
    logits = page["cait"](images, network.state_dict(), heads)
    torch.testing.assert_close(logits, network(images), rtol=1e-3, atol=1e-3)


def test_stochastic_depth_of_the_page_is_that_of_the_source(page):
    branch = torch.randn(64, 5, 3)
    torch.manual_seed(1)
    expected = DropPath(0.4).train()(branch)
    torch.manual_seed(1)
    torch.testing.assert_close(page["drop_path"](branch, 0.4), expected)


def test_distillation_of_the_page_is_that_of_the_source(page):
    logits, teacher, labels = torch.randn(8, 5), torch.randn(8, 5), torch.randint(5, (8,))
    loss = torch.nn.functional.cross_entropy(logits, labels)
    expected = DistillationSettings(distillation="hard").distilled_loss(loss, logits, teacher)
    torch.testing.assert_close(page["hard_distillation"](logits, labels, teacher), expected)


def test_the_notebook_has_the_page_and_its_code():
    blocks = BLOCK.findall((REPO / "docs/cait.md").read_text())
    notebook = json.loads((REPO / "docs/cait.ipynb").read_text())
    cells = [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert ["".join(lines) + "\n" for lines in cells] == blocks
