"""Each row of the paper's tables: its network, its hyper-parameters, its command, and a step of each kind."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from harness import DEVICES, slow
from torch.utils.flop_counter import FlopCounterMode

from cait import references
from cait.cli import main
from cait.extras.paper.ablations import Ablations
from cait.extras.paper.rows import Row, row_named, rows
from cait.extras.paper.zoo import Cost, known_costs, models
from cait.model.config import VARIANTS, CaiTConfig

ROWS = rows()
ONE_OF_EACH_TABLE = {row.table: row.id for row in ROWS.values()}.values()
ALL_ROWS = [
    id if id in ONE_OF_EACH_TABLE else pytest.param(id, marks=pytest.mark.slow) for id in ROWS
]
DEPTHS = (12, 18, 24, 36)
# Published top-1, written down once more from the paper: by column, at 12, 18, 24 and 36 blocks.
TABLE_1 = {
    "baseline": (79.9, 80.1, 78.9, 78.9),
    "adapted": (79.9, 80.7, 81.0, 81.9),
    "rezero": (78.3, 80.1, 80.8, 81.6),
    "t-fixup": (79.4, 81.7, 81.5, 82.1),
    "fixup": (80.7, 82.0, 82.3, 82.4),
    "scalar": (80.4, 81.6, 81.1, 81.6),
    "layerscale": (80.5, 81.7, 82.4, 82.9),
}
TABLE_A1 = {
    "zero": (79.7, 81.5, 82.1, 82.7),
    "uniform": (80.2, 80.8, 82.1, 82.6),
    "epsilon": (80.5, 81.7, 82.4, 82.9),
}
TABLE_2 = dict(zip((0, 2, 4, 8, 10, 11), (79.9, 80.0, 80.0, 80.0, 80.5, 80.3), strict=True))
TABLE_2_STAGES = {
    (9, 3): 79.6,
    (10, 2): 80.3,
    (11, 1): 80.6,
    (12, 1): 80.8,
    (12, 2): 80.8,
    (12, 3): 80.6,
}
TABLE_8 = [79.9, 80.0, 80.5, 69.9, 80.5, 83.0, 83.2, 83.4, 83.8, 84.8, 85.2, 85.4]
MODELS = {
    "xxs24": (77.6, 80.4, 78.4, 80.9),
    "xxs36": (79.1, 81.8, 79.7, 82.2),
    "xs24": (81.8, 83.8, 82.0, 84.1),
    "xs36": (82.6, 84.3, 82.9, 84.8),
    "s24": (82.7, 84.3, 83.5, 85.1),
    "s36": (83.3, 85.0, 84.0, 85.4),
    "s48": (83.5, 85.1, 83.9, 85.3),
    "m24": (83.4, 84.5, 84.7, 85.8),
    "m36": (83.8, 84.9, 85.1, 86.1),
}
RATES = dict(zip(DEPTHS, (0.05, 0.1, 0.2, 0.25), strict=True))


def resolved(
    row: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *more: str
) -> dict:
    """What `cait fit` would run, by way of LightningCLI."""
    monkeypatch.setattr(sys, "argv", ["cait"])
    with pytest.raises(SystemExit) as stop:
        main(
            ["fit" if not rows()[row].evaluate else "eval", "--paper", row, *more, "--print_config"]
        )
    assert stop.value.code in (0, None)
    return yaml.safe_load(capsys.readouterr().out)


def test_the_published_figures_are_all_there() -> None:
    top1 = {id: row.top1 for id, row in rows().items()}
    expected = {
        f"{table}/{column}-{depth}": figure
        for table, columns in (("table1", TABLE_1), ("table-a1", TABLE_A1))
        for column, figures in columns.items()
        for depth, figure in zip(DEPTHS, figures, strict=True)
    }
    expected |= {"table1/adapted-48": 80.7, "table2/average-pooling": 80.3}
    expected |= {f"table2/insert-{at}": figure for at, figure in TABLE_2.items()}
    expected |= {f"table2/sa{sa}-ca{ca}": figure for (sa, ca), figure in TABLE_2_STAGES.items()}
    expected |= dict(zip((id for id in top1 if id.startswith("table8/")), TABLE_8, strict=True))
    expected |= {
        "appendix-b/cls-in-keys": 83.44,
        "appendix-b/cls-not-in-keys": 83.31,
        "appendix-b/no-layerscale-in-ca": 83.36,
    }
    kinds = ("224", "384", "224-distilled", "384-distilled")
    expected |= {
        f"models/{name}-{kind}": figure
        for name, figures in MODELS.items()
        for kind, figure in zip(kinds, figures, strict=True)
    }
    expected |= {"models/m48-224-distilled": None, "models/m48-448-distilled": 86.5}
    assert top1 == expected
    failed = {id for id, row in rows().items() if row.failed}
    assert failed == {"table1/baseline-24", "table1/baseline-36", "table8/depth-36"}


def test_every_row_of_table_2_has_the_papers_size() -> None:
    for row in ROWS.values():
        if row.table == "table2":
            counted = cost(row.network())
            size = (round(counted.parameters / 1e6), round(counted.gmacs_published, 1))
            assert size == (row.parameters, row.gflops), row.id


@pytest.mark.parametrize("id", ALL_ROWS)
def test_every_row_resolves_to_the_published_hyper_parameters(id: str, capsys, monkeypatch) -> None:
    config = resolved(id, capsys, monkeypatch)
    model, data, trainer = config["model"], config["data"], config["trainer"]
    row, network = rows()[id], rows()[id].network()
    fields = model["fields"] or {}
    table, name = id.split("/")

    # The network that is listed is the network that is trained.
    assert (model["name"], data["img_size"]) == (row.settings["model.name"], network.img_size)
    for key, value in fields.items():
        assert getattr(network, key) == value, key

    assert (data["auto_augment"], data["erase_prob"], data["repeats"]) == (
        "rand-m9-mstd0.5-inc1",
        0.25,
        3,
    )
    assert (data["mixup"], data["cutmix"], data["mix_prob"], data["mix_switch_prob"]) == (
        0.8,
        1.0,
        1.0,
        0.5,
    )
    assert (model["label_smoothing"], model["warmup_lr"]) == (0.1, 1e-6)
    assert (model["warmup_epochs"], data["interpolation"]) == (5, "bicubic")
    assert (trainer["gradient_clip_val"], trainer["precision"]) == (None, "bf16-mixed")
    distilled = name.endswith("-distilled") or id == "table8/distillation"
    assert model["distillation"] == ("hard" if distilled else "none")
    if distilled:
        assert (model["teacher"], model["distillation_alpha"]) == ("regnety_160.deit_in1k", 0.5)
    if row.evaluate:
        return

    assert config["run_name"] == f"{table}-{name}"
    recipe = (model["lr"], model["min_lr"], model["weight_decay"], data["batch_size"])
    if id == "models/m48-448-distilled":
        assert (trainer["max_epochs"], data["img_size"], model["drop_path_rate"]) == (60, 448, 0.3)
        assert (*recipe, model["lr_base_size"]) == (5e-6, 5e-6, 0.05, 256 // 8, 256)
    elif data["img_size"] == 384:
        assert (trainer["max_epochs"], model["drop_path_rate"]) == (30, 0.0)
        assert (*recipe, model["lr_base_size"]) == (5e-6, 5e-6, 1e-8, 512 // 8, 512)
    else:
        assert (*recipe, model["lr_base_size"]) == (5e-4, 1e-5, 0.05, 1024 // 8, 512)
        ablation = table in ("table1", "table-a1", "table2") or (
            table == "table8" and name != "epochs-400"
        )
        assert trainer["max_epochs"] == (300 if ablation else 400)
        assert model["weights"] is None
    # The crop ratio became 1.0 in the last line of Table 8.
    assert data["crop_pct"] == (1.0 if table == "models" else 0.875)

    if table == "models":
        assert fields == {}
        wanted = {"224": 224, "384": 384, "448": 448}[name.split("-")[1]]
        assert data["img_size"] == wanted
        if wanted == 224:
            assert network.drop_path_rate == VARIANTS[model["name"]]["drop_path_rate"]
    else:
        assert network.embed_dim == 384
    if table in ("table1", "table-a1"):
        column, depth = name.rsplit("-", 1)
        assert (network.depth, network.num_heads, network.talking_heads) == (int(depth), 6, False)
        assert (network.class_token_at, network.depth_token_only) == (0, 0)
        rate = 0.05 if column == "baseline" else {**RATES, 48: 0.3}[int(depth)]
        assert network.drop_path_rate == rate
        forms = dict.fromkeys(("baseline", "adapted"), "plain") | dict.fromkeys(
            TABLE_A1, "layerscale"
        )
        assert network.residual == forms.get(column, column)
        if network.residual in ("layerscale", "scalar"):
            rule = {12: 0.1, 18: 0.1, 24: 1e-5, 36: 1e-6}[int(depth)]
            assert network.epsilon == (0.0 if column == "zero" else rule)
            assert network.layer_scale_dist == ("uniform" if column == "uniform" else "constant")


def test_table_2_and_the_path_of_table_8_and_appendix_b() -> None:
    for at in TABLE_2:
        network = row_named(f"table2/insert-{at}").network()
        assert (network.class_token_at, network.depth, network.depth_token_only) == (at, 12, 0)
        assert (network.residual, network.num_heads, network.talking_heads) == ("plain", 6, False)
    for sa, ca in TABLE_2_STAGES:
        network = row_named(f"table2/sa{sa}-ca{ca}").network()
        assert (network.class_token_at, network.depth, network.depth_token_only) == (None, sa, ca)
        assert (network.residual, network.num_heads, network.talking_heads) == ("plain", 6, False)
    assert row_named("table2/average-pooling").network().global_pool == "avg"

    path = [row for row in rows().values() if row.table == "table8"]
    steps = [
        ("num_heads", 8),
        ("talking_heads", True),
        ("depth", 36),
        ("residual", "layerscale"),
        ("drop_path_rate", 0.2),
        ("class_token_at", None),
    ]
    for before, after, (key, value) in zip(path, path[1:], steps, strict=False):
        assert getattr(before.network(), key) != value
        assert getattr(after.network(), key) == value, after.id
    s36, end = row_named("models/s36-224").network(), row_named("table8/epochs-400").network()
    assert (Ablations(**vars(s36)), s36.epsilon) == (end, 1e-6)
    assert [row.network().img_size for row in path] == [224] * 8 + [256, 384, 384, 384]
    assert [row.id for row in path if row.evaluate] == ["table8/test-at-256", "table8/crop-ratio-1"]

    base, keys, scale = (row.network() for row in rows().values() if row.table == "appendix-b")
    assert base == end
    assert (keys.cls_in_keys, scale.layer_scale_token_only) == (False, False)


def hparams(row: str) -> dict:
    """What a run of the row notes of its module."""
    about = dict(
        name=row_named(row).settings["model.name"], num_classes=1000, fields=row_named(row).fields
    )
    return about | {
        "_instantiator": "lightning.pytorch.cli.instantiate_module",
        "drop_path_rate": 0.05,
    }


def test_the_listing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--paper` beside another `--config` trains under the row's name, but reproduces nothing."""
    monkeypatch.chdir(tmp_path)
    others = (
        dict(num_classes=10),
        dict(name="timm/vit_tiny_patch16_224"),
        dict(fields={"patch_size": 4}),
    )
    for depth, other in zip(DEPTHS, ({}, *others), strict=True):
        row = f"table1/rezero-{depth}"
        folder = tmp_path / "logs" / row.replace("/", "-")
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text("epoch,step,val/acc1\n0,9,1.5\n1,19,\n1,19,78.25\n")
        (folder / "hparams.yaml").write_text(yaml.safe_dump(hparams(row) | other))
    scored = tmp_path / "logs/table8-test-at-256"
    scored.mkdir()
    names = [f"{number}" for number in range(1000)]
    model = row_named("table8/test-at-256").settings["model.name"]
    about = {"model": model, "class_names": names, "raw": {"acc1": 79.5}}
    (scored / "evaluation.json").write_text(json.dumps(about))
    main(["paper"])
    shown = capsys.readouterr().out
    assert shown.count("78.25") == 1
    assert re.search(r"table8/test-at-256 .* 79\.50 ", shown)
    for line in (
        r"table1/layerscale-36 │ as adapted-36, residual layerscale +│ +82\.9 │ not run",
        r"table1/rezero-12 +│ as adapted-12, residual rezero +│ +78\.3 │ 78\.25 after 2 epochs",
        r"table8/depth-36 .* 69\.9†",
        "train a row: cait fit --paper appendix-b/cls-in-keys",
        "score a row: cait eval --paper table8/test-at-256",
    ):
        assert re.search(line, shown), line


def test_a_row_appends_to_the_lists_of_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"defaults": {"trainer.callbacks+": "own.A"}, "rows": {}}
    monkeypatch.setattr("cait.extras.paper.rows.tables", lambda: {"mine": table})
    changes = {"trainer.callbacks+": ["own.B"], "model.lr": 1.0}
    assert Row("mine", "a", changes).settings == changes | {
        "trainer.callbacks+": ["own.A", "own.B"]
    }


def test_what_is_given_beside_a_row_wins(capsys, monkeypatch) -> None:
    more = ("--model.lr=1e-3", "--run_name=mine", "--model.fields.depth=7")
    config = resolved("table1/rezero-12", capsys, monkeypatch, *more)
    assert (config["model"]["lr"], config["run_name"], config["model"]["fields"]["depth"]) == (
        1e-3,
        "mine",
        7,
    )
    assert config["model"]["fields"]["residual"] == "rezero"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fit", "--paper", "table1/layerscal-36"], "did you mean table1/layerscale-36"),
        (["fit", "--paper"], "the paper has no row ''"),
        (["fit", "--paper", "table8/test-at-256"], "cait eval --paper table8/test-at-256"),
        (["fit", "--paper", "models/s36-384"], "cait fit --paper models/s36-224` first"),
        (["eval", "--paper", "table8/crop-ratio-1"], "cait fit --paper table8/distillation` first"),
        (["paper", "table9"], "no table 'table9'"),
    ],
)
def test_what_cannot_be_is_told(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1


# The row's own recipe on the digits, with a network and a length of seconds.
SHRUNK = [
    *DEVICES,
    "--data.root=data/digits",
    "--data.img_size=16",
    "--data.batch_size=64",
    "--data.num_workers=0",
    "--model.fields.patch_size=4",
    "--model.fields.embed_dim=48",
    "--trainer.limit_val_batches=1",
    "--trainer.log_every_n_steps=1",
]
STEPS = ["--trainer.max_steps=2", "--model.warmup_epochs=0"]


def run(verb: str, id: str, *more: str) -> None:
    main([verb, "--paper", id, *SHRUNK, *more])


def trained(id: str) -> dict:
    return torch.load(
        Path("logs") / id.replace("/", "-") / "checkpoints/last.ckpt", weights_only=True
    )


# A row of each kind that starts from nothing: its id, and what it has that no other has.
@pytest.mark.parametrize(
    ("id", "key"),
    [
        ("table1/fixup-12", "blocks.3.mlp.bias_fc1.bias"),
        ("table8/talking-heads", "blocks.3.attn.proj_l.weight"),
        *slow(
            ("table1/adapted-12", "blocks.3.norm1.weight"),
            ("table1/t-fixup-12", "blocks.3.attn.qkv.weight"),
            ("table1/scalar-12", "blocks.3.gamma_1"),
            ("table-a1/uniform-12", "blocks.3.gamma_1"),
            ("table2/insert-2", "cls_token"),
            ("table2/average-pooling", "pos_embed"),
            ("appendix-b/cls-not-in-keys", "blocks_token_only.1.gamma_1"),
            ("models/xxs24-224", "blocks_token_only.1.gamma_2"),
        ),
    ],
)
def test_a_row_of_each_kind_takes_real_steps(id: str, key: str, here: Path) -> None:
    run("fit", id, *STEPS, "--model.fields.depth=4", "--model.fields.num_heads=4")
    checkpoint = trained(id)
    weight = checkpoint["state_dict"][f"model.{key}"]
    assert checkpoint["global_step"] == 2
    assert weight.isfinite().all()
    shrunk = dict(patch_size=4, embed_dim=48, depth=4, num_heads=4)
    # which `Row.is_of` compares
    assert checkpoint["hyper_parameters"]["fields"] == row_named(id).fields | shrunk
    steps = checkpoint["optimizer_states"][0]["state"].values()
    assert all(state["step"] == 2 and state["exp_avg"].isfinite().all() for state in steps)


def test_fine_tuning_distillation_and_scoring_take_the_weights_of_their_row(
    here: Path, capsys
) -> None:
    import timm

    torch.save(timm.create_model("test_resnet", num_classes=10).state_dict(), "teacher.pth")
    small = ["--model.fields.depth=2", "--model.fields.num_heads=4"]
    teacher = ["--model.teacher=test_resnet.r160_in1k", "--model.teacher_path=teacher.pth"]
    run("fit", "models/s36-224-distilled", *STEPS, *small, *teacher)
    first = trained("models/s36-224-distilled")["state_dict"]
    assert not any("teacher" in key for key in first)
    still = ["--model.lr=0", "--model.min_lr=0", "--model.warmup_lr=0"]
    run("fit", "table8/distillation", *STEPS, *small, *teacher, *still, "--data.img_size=32")
    second = trained("table8/distillation")["state_dict"]
    assert second["model.pos_embed"].shape == (1, 64, 48)
    assert all(
        torch.equal(value, second[key]) for key, value in first.items() if key != "model.pos_embed"
    )
    scores = []
    for more in ([], ["--ckpt_path=logs/table8-distillation/checkpoints/last.ckpt"]):
        capsys.readouterr()
        run("eval", "table8/crop-ratio-1", *small, *more, "--data.img_size=32")
        scores.append(re.search(r"\bloss\b\D+([\d.]+)", capsys.readouterr().out)[1])
    assert scores[0] == scores[1]


# GMACs at 224 and 384 counted on timm's models, M-48 at 448 in place of 384 at the end.
GMACS = {
    "xxs24": (2.523, 9.599),
    "xxs36": (3.756, 14.313),
    "xs24": (5.390, 19.241),
    "xs36": (8.030, 28.700),
    "s24": (9.327, 32.110),
    "s36": (13.902, 47.908),
    "s48": (18.477, 63.706),
    "m24": (35.776, 115.868),
    "m36": (53.367, 172.944),
    "m48": (70.959, 329.108),
}


def cost(config: CaiTConfig) -> Cost:
    """The parameters and multiply-adds of a network, counted on the meta device: the largest takes no memory."""
    with torch.device("meta"):
        model = references.locate(config.network)(config).eval().requires_grad_(False)
        gmacs = _gmacs(model, torch.empty(1, config.in_chans, config.img_size, config.img_size))
        patches, one_more = (
            torch.empty(1, config.num_patches + more, config.embed_dim) for more in (0, 1)
        )
        token = _gmacs(model.blocks[0], one_more) - _gmacs(model.blocks[0], patches)
    at = getattr(config, "class_token_at", None)
    without_token = config.depth if at is None else at
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Cost(parameters, gmacs, gmacs + without_token * token)


def _gmacs(module: Any, x: Any) -> float:
    with FlopCounterMode(display=False) as counter:
        module(x)
    return counter.get_total_flops() / 2e9


@pytest.fixture(scope="module")
def costs() -> dict[tuple[str, int], Cost]:
    found = {key: cost(of_model[0].network()) for key, of_model in models().items()}
    known = known_costs()
    assert known.keys() == found.keys()
    assert all(known[key] == pytest.approx(found[key], rel=1e-6) for key in found)
    return known


@pytest.mark.slow
def test_multiply_adds_are_those_counted_on_timms_models(
    costs: dict[tuple[str, int], Cost],
) -> None:
    sizes = {name: (224, 448 if name == "m48" else 384) for name in VARIANTS}
    counted = {
        (name, size): each
        for name in sizes
        for size, each in zip(sizes[name], GMACS[name], strict=True)
    }
    assert {key: costs[key].gmacs for key in costs} == pytest.approx(counted, rel=0.005)


@pytest.mark.slow
def test_one_token_more_reproduces_sixteen_of_the_nineteen_published_figures(
    costs: dict[tuple[str, int], Cost],
) -> None:
    published = {
        key: of_model[0].gflops for key, of_model in models().items() if of_model[0].gflops
    }
    exact = {
        key for key, figure in published.items() if round(costs[key].gmacs_published, 1) == figure
    }
    assert len(exact) == 16
    assert published.keys() - exact == {("xxs24", 384), ("xxs36", 384), ("s36", 224)}
    assert sum(round(costs[key].gmacs, 1) == figure for key, figure in published.items()) == 4


def test_zoo_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["zoo"])
    shown = capsys.readouterr().out
    assert re.search(
        r"xxs24 +│ +224 │ +11,956,264 │ +2\.523 │ +2\.5 │ +2\.5 │ +77\.6 │ +78\.4", shown
    )
    assert re.search(r"m48 +│ +448 │ +356,460,520 │ .* 86\.5", shown)
