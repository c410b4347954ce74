"""Each row of the paper's tables: its network, its hyper-parameters, its command, and a step of each kind."""

import re
import sys
from pathlib import Path

import pytest
import timm
import torch
import yaml
from harness import DEVICES, checkpoint, over_table, parsed, slow
from torch.utils.flop_counter import FlopCounterMode

from cait import references
from cait.cli import main
from cait.extras.paper.rows import row_named, rows
from cait.extras.paper.zoo import Cost, known_costs, models
from cait.model.config import variant_config
from cait.settings import flatten

IN_THE_PAPER = parsed(Path(__file__).with_name("published.yaml"))["rows"]
ROWS = rows()
LAST_OF_EACH_TABLE = {row.table: id for id, row in ROWS.items()}.values()
OTHERS = [id for id in ROWS if id not in LAST_OF_EACH_TABLE]


def test_every_row_has_the_figures_and_the_network_of_the_paper():
    assert ROWS.keys() == IN_THE_PAPER.keys()
    for id, row in ROWS.items():
        network = row.network()
        published = {"failed": False, "evaluate": False} | IN_THE_PAPER[id]
        for name, value in published.items():
            holder = row if name in ("top1", "failed", "evaluate") else network
            assert "." in name or getattr(holder, name) == value, (id, name)


@pytest.mark.parametrize("id", [*LAST_OF_EACH_TABLE, *slow(*OTHERS)])
def test_every_row_runs_with_the_settings_of_the_paper(id, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["cait"])
    row = ROWS[id]
    with pytest.raises(SystemExit):
        main(["eval" if row.evaluate else "fit", "--paper", id, "--print_config"])
    config = yaml.safe_load(capsys.readouterr().out)
    settings = flatten(config)
    for name, value in IN_THE_PAPER[id].items():
        assert "." not in name or settings[name] == value, name
    assert row.evaluate or config["run_name"] == id.replace("/", "-")
    # the network that is listed is the network that is trained
    trained = variant_config(
        settings["model.name"],
        img_size=settings["data.img_size"],
        drop_path_rate=settings["model.drop_path_rate"],
        **config["model"]["fields"] or {},
    )
    assert trained == row.network()


SMALLER = {"patch_size": 4, "embed_dim": 48, "num_heads": 4}
# A row's own recipe on the digits, with a network and a length of seconds.
SHORT = """
    --data.root=data/digits --data.img_size=16 --data.batch_size=64 --data.num_workers=0
    --trainer.limit_val_batches=1 --trainer.log_every_n_steps=1
"""
TWO_STEPS = ["--trainer.max_steps=2", "--model.warmup_epochs=0"]


def run(verb, id, depth, *words):
    smaller = SMALLER | {"depth": depth}
    fields = [f"--model.fields.{name}={value}" for name, value in smaller.items()]
    main([verb, "--paper", id, *DEVICES, *SHORT.split(), *fields, *words])


def trained(id, depth, *words):
    """The checkpoint of a row after two steps."""
    run("fit", id, depth, *TWO_STEPS, *words)
    return checkpoint(Path("logs", id.replace("/", "-")))


@over_table(__file__, "kinds")
def test_a_row_of_each_kind_takes_real_steps(id, weight, here):
    saved = trained(id, 4)
    assert saved["state_dict"][f"model.{weight}"].isfinite().all()
    # which `Row.is_of` compares
    fields = row_named(id).fields | SMALLER | {"depth": 4}
    assert saved["hyper_parameters"]["fields"] == fields
    assert saved["global_step"] == 2
    for state in saved["optimizer_states"][0]["state"].values():
        assert state["step"] == 2
        assert state["exp_avg"].isfinite().all()


def test_fine_tuning_distillation_and_scoring_take_the_weights_of_their_row(here, capsys):
    torch.save(timm.create_model("test_resnet", num_classes=10).state_dict(), "teacher.pth")
    teacher = ["--model.teacher=test_resnet.r160_in1k", "--model.teacher_path=teacher.pth"]
    first = trained("models/s36-224-distilled", 2, *teacher)["state_dict"]
    assert not any("teacher" in name for name in first)

    still = ["--model.lr=0", "--model.min_lr=0", "--model.warmup_lr=0", "--data.img_size=32"]
    second = trained("table8/distillation", 2, *teacher, *still)["state_dict"]
    assert second["model.pos_embed"].shape == (1, 64, 48)
    for name in first.keys() - {"model.pos_embed"}:
        assert torch.equal(first[name], second[name]), name

    capsys.readouterr()
    for words in ([], ["--ckpt_path=logs/table8-distillation/checkpoints/last.ckpt"]):
        run("eval", "table8/crop-ratio-1", 2, "--data.img_size=32", *words)
    first, second = re.findall(r"\bloss\b\D+([\d.]+)", capsys.readouterr().out)
    assert first == second


def cost(config):
    """The parameters and multiply-adds of a network, counted on the meta device: the largest takes no memory."""
    with torch.device("meta"):
        model = references.locate(config.network)(config).eval().requires_grad_(False)
        images = torch.empty(1, config.in_chans, config.img_size, config.img_size)
        patches = torch.empty(1, config.num_patches, config.embed_dim)
        one_more = torch.empty(1, config.num_patches + 1, config.embed_dim)
    counted = gmacs(model, images)
    of_a_token = gmacs(model.blocks[0], one_more) - gmacs(model.blocks[0], patches)
    enters_at = getattr(config, "class_token_at", None)
    without_token = config.depth if enters_at is None else enters_at
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Cost(parameters, counted, counted + without_token * of_a_token)


def gmacs(module, x):
    with FlopCounterMode(display=False) as counter:
        module(x)
    return counter.get_total_flops() / 2e9


def test_every_row_of_table_2_has_the_papers_size():
    for row in ROWS.values():
        if row.table == "table2":
            counted = cost(row.network())
            assert round(counted.parameters / 1e6) == row.parameters, row.id
            assert round(counted.gmacs_published, 1) == row.gflops, row.id


@pytest.mark.slow
def test_the_costs_are_those_that_are_counted_again():
    counted = {model: cost(rows[0].network()) for model, rows in models().items()}
    assert counted == {
        model: pytest.approx(known, rel=1e-6) for model, known in known_costs().items()
    }
