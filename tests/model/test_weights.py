"""Weights in, in every form they come in, against timm's models and loaders."""

import os
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import DEVICES, SMALL
from modules import loader, module, trainer
from safetensors.torch import save_file
from same import same
from weight_files import forms, told

import cait
from cait import ckpt
from cait.cli import main
from cait.errors import UserError
from cait.model.weights import load_weights, read_weights


@pytest.fixture(scope="module")
def theirs() -> dict[str, torch.Tensor]:
    return cait.create_model(**SMALLEST).state_dict()


@pytest.fixture(scope="module")
def files(
    theirs: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    return forms(tmp_path_factory.mktemp("weights"), theirs)


def test_every_form_of_file_holds_the_same_weights(theirs, files) -> None:
    for path in files.values():
        got = {key.removeprefix("module."): value for key, value in read_weights(path)[0].items()}
        assert got.keys() == theirs.keys(), path
        assert all(torch.equal(got[key], value) for key, value in theirs.items()), path
    assert read_weights(files["timm.pth.tar"], ema=True)[0].keys() == theirs.keys()


SMALLEST = dict(
    name="xxs24", img_size=8, num_classes=4, embed_dim=16, depth=1, num_heads=2, patch_size=4
)
PREFIXES = [
    "",
    "module.",
    "_orig_mod.",
    "module._orig_mod.",
    "model._orig_mod.",
    "model.",
    "net.",
    "timm_model.",
    "a.b.",
]
HOLDERS = ["", "state_dict", "model", "model_state_dict", "student", "net"]


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_weights_behind_one_prefix_are_taken(prefix: str, holder: str, tmp_path: Path) -> None:
    """As compilation, DDP, Lightning, timm and the scripts of others save them, beside what is no part of them."""
    theirs, ours = (cait.create_model(**SMALLEST) for _ in range(2))
    state = {f"{prefix}{key}": value for key, value in theirs.state_dict().items()}
    beside = {"n_averaged": torch.tensor(3), "criterion.weight": torch.ones(2)} if prefix else {}
    optimizer = {"epoch": 3, "optimizer_state_dict": {"state": {}}}
    torch.save(
        {holder: state | beside} | optimizer if holder else state | beside, tmp_path / "x.pth"
    )
    assert load_weights(ours, tmp_path / "x.pth") == []
    assert all(
        torch.equal(value, theirs.state_dict()[key]) for key, value in ours.state_dict().items()
    )


@pytest.mark.parametrize("prefix", ["", "net.", "model."])
def test_another_script_of_lightnings_calls_its_network_what_it_will(
    prefix: str, tmp_path: Path
) -> None:
    theirs, ours = (cait.create_model(**SMALLEST) for _ in range(2))
    state = {f"{prefix}{key}": value for key, value in theirs.state_dict().items()}
    checkpoint = {"pytorch-lightning_version": "2.6.6", "state_dict": state}
    torch.save(checkpoint, tmp_path / "x.ckpt")
    assert load_weights(ours, tmp_path / "x.ckpt") == []
    assert same(ours.state_dict(), theirs.state_dict())


def test_what_a_file_has_in_the_place_of_weights_is_named(tmp_path: Path) -> None:
    state = cait.create_model(**SMALLEST).state_dict()
    both = {f"{prefix}{key}": value for prefix in ("a.", "b.") for key, value in state.items()}
    part = {f"net.{key}": value for key, value in state.items() if key != "norm.weight"}
    others = {f"layer{number}.weight": torch.ones(1) for number in range(9)}
    for content, words in (
        ({"one": state, "two": state}, "holds no weights; it has one, two"),
        (both, "behind each of a., b.: save those of one alone"),
        (part, "x.pth is of another network: norm.weight is missing in it"),
        (
            others,
            "x.pth, with the names layer0.weight, layer1.weight, layer2.weight and 6 more, is of another network",
        ),
    ):
        torch.save(content, tmp_path / "x.pth")
        with pytest.raises(UserError, match=words):
            load_weights(cait.create_model(**SMALLEST), tmp_path / "x.pth")
    with pytest.raises(UserError, match=r"is a folder: name a file of weights in it, as x.pth"):
        read_weights(tmp_path)
    (tmp_path / "x.pth").rename(tmp_path / "__0_0.distcp")
    with pytest.raises(UserError, match="there is none; join the parts that FSDP"):
        read_weights(tmp_path)


@pytest.mark.parametrize("at", [8, 16])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda value: value.to(torch.int8),
            r"is of the type int8 in it, of the type float32 in the model",
        ),
        (lambda value: value > 0, r"is of the type bool in it"),
        (lambda value: value.to(torch.complex64), r"is of the type complex64 in it"),
        (lambda value: value / 0, r"is not finite"),
        (lambda value: value.double() * 1e300, r"is not finite"),
        (lambda value: value.to("meta"), "is without values, as on the device meta"),
        (lambda value: value.to_sparse(), "is sparse in it, whole in the model"),
        (lambda value: value.half(), None),
    ],
)
def test_weights_are_finite_floats(change: Any, words: str | None, at: int, tmp_path: Path) -> None:
    """Where the network has them, also where weights of another resolution are fitted to it."""
    state = cait.create_model(**SMALLEST).state_dict()
    torch.save(state | {"norm.weight": change(state["norm.weight"])}, tmp_path / "x.pth")
    network = cait.create_model(**SMALLEST | {"img_size": at})
    with (
        pytest.raises(UserError, match=rf"x\.pth .*: norm\.weight {words}")
        if words
        else nullcontext()
    ):
        load_weights(network, tmp_path / "x.pth")


@pytest.mark.parametrize(
    ("save", "words"),
    [
        (
            lambda path: torch.save({"acc": np.float64(1), "model": {}}, path),
            r"holds numpy\.\S+, which is neither",
        ),
        (
            lambda path: torch.save(torch.nn.Linear(2, 2), path),
            r"holds torch\.nn\.\S+\.Linear, which is neither",
        ),
        (
            lambda path: torch.jit.script(torch.nn.Linear(2, 2)).save(path),
            r"a TorchScript archive.*state_dict\(\)",
        ),
        (lambda path: path.write_text('{"weight_map": {}}'), "is JSON: name a file of tensors"),
        (
            lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"),
            "a pointer of Git LFS",
        ),
        (lambda path: path.touch(), "it is empty"),
        (
            lambda path: torch.save(torch.ones(999), path) or os.truncate(path, 999),
            "a zip archive that is cut off",
        ),
        (
            lambda path: torch.save({"state_dict": {"a": torch.ones(1)}}, path),
            "name it with --model.weights",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_why_a_file_cannot_be_read_is_told(save: Any, words: str, tmp_path: Path) -> None:
    save(path := tmp_path / f"x.{'json' if 'JSON' in words else 'pt'}")
    with pytest.raises(UserError, match=rf"^{path} (cannot be read as|is not a whole).*{words}"):
        (ckpt.read_checkpoint if "--model" in words else read_weights)(path)


def test_safetensors_are_read_whatever_the_file_is_called(tmp_path: Path) -> None:
    save_file(cait.create_model(**SMALLEST).state_dict(), tmp_path / "pytorch_model.bin")
    assert load_weights(cait.create_model(**SMALLEST), tmp_path / "pytorch_model.bin") == []


def test_weights_that_have_changed_on_the_disk_are_refused(tmp_path: Path) -> None:
    torch.save(state := cait.create_model(**SMALLEST).state_dict(), path := tmp_path / "x.pth")
    whole = bytearray(path.read_bytes())
    whole[whole.index(state["norm.weight"].numpy().tobytes()) + 3] ^= 0x80
    path.write_bytes(whole)
    with pytest.raises(UserError, match=r"x\.pth is damaged"):
        load_weights(cait.create_model(**SMALLEST), path)


class Bomb:
    """Unpickled without care, it writes a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.trace),)


def test_unusable_files_are_told(files, tmp_path: Path) -> None:
    (tmp_path / "text.pth").write_text("no weights")
    for name, content in (
        ("list", [1, 2]),
        ("numbers", {"model": {1: 2}}),
        ("tensor", {"model": torch.zeros(1)}),
    ):
        torch.save(content, tmp_path / f"{name}.pth")
        assert "holds no weights" in told(tmp_path / f"{name}.pth")
    assert "do not exist" in told(tmp_path / "none.pth")
    assert "cannot be read" in told(tmp_path / "text.pth")
    assert "no moving average" in told(files["release.pth"], ema=True)
    torch.save({"pytorch-lightning_version": "2.6.6", "state_dict": {}}, tmp_path / "alone.ckpt")
    assert "no moving average" in told(tmp_path / "alone.ckpt", ema=True)


def test_the_network_that_a_file_names_is_told(tmp_path: Path) -> None:
    named = {"hyper_parameters": {"name": "xs24", "fields": {"depth": 3}}}, {"arch": "resnet18"}
    for content, words in zip(
        named, ("of xs24 with --model.fields '{\"depth\": 3}'", "of timm/resnet18"), strict=True
    ):
        torch.save({"state_dict": {"a": torch.zeros(3)}} | content, tmp_path / "theirs.pth")
        assert told(tmp_path / "theirs.pth").endswith(f"in the model; it is {words}")
    torch.save(
        {"state_dict": {"a": torch.zeros(3)}, "hyper_parameters": {"lr": 0.1}},
        tmp_path / "theirs.pth",
    )
    assert told(tmp_path / "theirs.pth").endswith("in the model")


def test_a_file_cut_short_is_told(tmp_path: Path) -> None:
    for path in forms(tmp_path, cait.create_model(**SMALLEST).state_dict()).values():
        whole = path.read_bytes()
        for length in (0, 100, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:length])
            assert "cannot be read as weights" in told(path)


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    trace, path = tmp_path / "trace", tmp_path / "bomb.pth"
    for save in (
        torch.save,
        lambda content, path: path.write_bytes(pickle.dumps(content, protocol=2)),
    ):
        save({"head.weight": torch.zeros(2), "head.bias": Bomb(trace)}, path)
        assert "cannot be read as weights" in told(path)
        assert not trace.exists()
    pickle.loads(path.read_bytes())
    assert trace.is_dir()  # it would have gone off


def test_weights_are_loaded_once_at_any_stage_and_never_over_a_checkpoint(tmp_path: Path) -> None:
    start = {key: value.clone() for key, value in module().model.state_dict().items()}
    torch.save(start, file := tmp_path / "start.pth")

    def holds(net: cait.CaiTModule, state: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(value, state[key]) for key, value in net.model.state_dict().items())

    for verb in ("validate", "predict"):
        net = module(weights=str(file))
        assert not holds(net, start)
        getattr(trainer(), verb)(net, loader())
        assert holds(net, start), verb

    net, fit = module(weights=str(file), lr=0.1, warmup_epochs=0), trainer()
    fit.fit(net, loader(), loader())
    assert not holds(net, start)  # trained
    trained = {key: value.clone() for key, value in net.model.state_dict().items()}
    fit.save_checkpoint(tmp_path / "trained.ckpt")
    trainer().validate(net, loader())
    loaded, fresh = (
        cait.CaiTModule.load_from_checkpoint(tmp_path / "trained.ckpt"),
        module(weights=str(file)),
    )
    trainer().validate(loaded, loader())
    trainer().validate(fresh, loader(), ckpt_path=tmp_path / "trained.ckpt")
    assert all(holds(each, trained) for each in (net, loaded, fresh))


CLASSES = ["ant", "bee", "cat", "dog"]
NETWORK: dict = dict(name="xxs24", img_size=8, embed_dim=16, depth=1, num_heads=2, patch_size=4)


@pytest.mark.parametrize(
    ("classes", "is_kept"),
    [
        (CLASSES, True),
        (None, True),
        (["dog", "bee", "cat", "ant"], True),
        (["ant", "bee", "cat", "eel"], False),
        (["eel", "fox"], False),
    ],
)
def test_the_head_is_kept_for_the_same_classes_alone(
    classes: list[str] | None, is_kept: bool, tmp_path: Path
) -> None:
    raw, ema = (cait.create_model(num_classes=4, **NETWORK).state_dict() for _ in range(2))
    checkpoint = {
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {f"model.{key}": value for key, value in raw.items()},
        "callbacks": {"EMA": ema},
        "ImageNetDataModule": {"class_names": CLASSES, "depends_on": {}},
    }
    torch.save(checkpoint, path := tmp_path / "known.ckpt")
    for theirs, is_average in ((raw, False), (ema, True)):
        model = cait.create_model(num_classes=len(classes or CLASSES), **NETWORK)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        assert load_weights(model, path, is_average, classes) == (
            [] if is_kept else ["the head starts anew"]
        )
        for key, value in model.state_dict().items():
            expected = theirs[key]
            if key.startswith("head"):
                expected = (
                    expected[[CLASSES.index(name) for name in classes or CLASSES]]
                    if is_kept
                    else before[key]
                )
            assert torch.equal(value, expected), key


def test_a_run_starts_from_another_runs_raw_or_averaged_weights(here: Path) -> None:
    cpu = [*SMALL, "--data.num_workers=0", *DEVICES]
    main(
        ["fit", *cpu, "--trainer.max_steps=8", "--ema.decay=0.9", "--run_name=a", "--model.lr=1e-2"]
    )
    source = "logs/a/checkpoints/last.ckpt"
    raw, ema = (read_weights(source, ema=ema)[0] for ema in (False, True))
    assert raw.keys() == ema.keys()
    assert not torch.equal(raw["head.weight"], ema["head.weight"])
    frozen = ["--model.lr=0", "--model.warmup_lr=0", "--model.min_lr=0", "--trainer.max_steps=1"]
    main(
        [
            "fit",
            *cpu,
            *frozen,
            f"--model.weights={source}",
            "--model.weights_ema=true",
            "--run_name=b",
        ]
    )
    got = read_weights("logs/b/checkpoints/last.ckpt")[0]
    assert all(torch.equal(got[key], value) for key, value in ema.items())
    Path(source).unlink()  # the run has its own by now
    main(["resume", "b", "--trainer.max_steps=2"])
    main(["eval", "b"])
