"""The notebooks of docs/ have the outputs of one run."""

import json
import re

import check
import pytest
from harness import REPO, python, works

OF_A_MACHINE = re.compile(r"(?<![\w.:/])/(?!/)[\w.-]+/|\\\\Users")
"""A path from the root, as no output may have it."""

MEASURES = """
import sys
absent = "lightning torchmetrics pl_bolts jsonargparse docstring_parser rich tensorboard sklearn matplotlib captum"
sys.modules.update(dict.fromkeys(f"{absent} imagehash joblib nvidia.nvimgcodec".split()))
sys.path.insert(0, "")
import kernel, step
from cait.model.attention import backend_named
backend_named("fused")
step.optimizer_of(step.Case("xxs24-32").build("ours"), "ours")
"""


@pytest.mark.parametrize("path", check.NOTEBOOKS, ids=str)
def test_a_notebook_has_the_outputs_of_one_run(path):
    text = (REPO / path).read_text()
    assert len(text) < 300_000
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    is_page = path.with_suffix(".md") in check.PAGES_AS_NOTEBOOKS
    assert is_page or all(cell["outputs"] for cell in cells[1:])  # the first one sets up
    pictures = 0
    for cell in cells:
        for output in cell["outputs"]:
            assert output["output_type"] in ("stream", "execute_result"), cell["id"]
            assert output.get("name", "stdout") == "stdout", cell["id"]
            pictures += "image/png" in output.get("data", {})
            texts = output.get("text", []), output.get("data", {}).get("text/plain", [])
            printed = "".join(line for text in texts for line in text)
            assert not OF_A_MACHINE.search(printed), printed
            assert not set("\r\x1b") & set(printed), "progress bars, or colors"
    assert is_page or pictures


def test_what_measures_a_gpu_needs_torch_and_timm_alone():
    """As `benchmarks/gpu.ipynb` says, which runs where nothing else can be installed."""
    works(python(MEASURES, REPO / "benchmarks"))
