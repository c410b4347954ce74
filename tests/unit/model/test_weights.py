"""Weights in, in every form they come in; what is said of useless ones is in tests/cli/golden/model.yaml."""

import argparse
import os
import pickle
import shutil

import pytest
import torch
from harness import SMALL, TWO_BLOCKS, over_table
from modules import FIELDS, loader, module, train, trainer
from safetensors.torch import save_file
from same import same

import cait
from cait.errors import UserError
from cait.model.weights import load_weights, read_weights


def small_network(num_classes=4):
    return cait.create_model("xxs24", 8, num_classes, **FIELDS)


def behind(prefix, state):
    return {prefix + name: weight for name, weight in state.items()}


def assert_loads(path, state, ema=None):
    network = small_network()
    assert load_weights(network, path, ema) == []
    assert same(network.state_dict(), state), path


def save_forms(folder, state, average):
    """The same weights in every form of file."""
    torch.save(state, folder / "bare.pth")
    released = {"model": behind("module.", state), "args": argparse.Namespace(lr=5e-4)}
    torch.save(released, folder / "release.pth")
    of_timm = {"state_dict": state, "epoch": 3, "state_dict_ema": average}
    torch.save(of_timm, folder / "timm.pth.tar")
    save_file(state, folder / "x.safetensors")
    save_file(state, folder / "pytorch_model.bin")
    return sorted(folder.iterdir())


def test_every_form_of_file_holds_the_same_weights(tmp_path):
    state = small_network().state_dict()
    average = small_network().state_dict()
    for path in save_forms(tmp_path, state, average):
        assert_loads(path, state)
    assert_loads(tmp_path / "timm.pth.tar", average, ema=True)
    half = {name: weight.half() for name, weight in state.items()}
    torch.save(half, tmp_path / "half.pth")
    assert_loads(tmp_path / "half.pth", {name: half[name].float() for name in half})


@over_table(__file__, "holders")
@over_table(__file__, "prefixes")
def test_weights_behind_one_prefix_are_taken(prefix, holder, tmp_path):
    """As compilation, DDP, Lightning, timm and the scripts of others save them, beside what is no part of them."""
    state = small_network().state_dict()
    content = behind(prefix, state)
    if prefix:
        content |= {"n_averaged": torch.tensor(3), "criterion.weight": torch.ones(2)}
    if holder == "lightning":
        content = {"state_dict": content, "pytorch-lightning_version": "2.6.6"}
    elif holder:
        content = {holder: content, "epoch": 3, "optimizer_state_dict": {"state": {}}}
    torch.save(content, tmp_path / "x.pth")
    assert_loads(tmp_path / "x.pth", state)


def test_a_file_cut_short_is_refused(tmp_path):
    state = small_network().state_dict()
    for path in save_forms(tmp_path, state, state):
        content = path.read_bytes()
        for length in (0, 100, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:length])
            with pytest.raises(UserError, match=str(path)):
                read_weights(path)


class Bomb:
    """Unpickled without care, it makes a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_code_in_a_file_is_not_run(tmp_path):
    trace = tmp_path / "trace"
    content = {"head.weight": torch.zeros(2), "head.bias": Bomb(trace)}
    torch.save(content, tmp_path / "zip.pth")
    (tmp_path / "bare.pth").write_bytes(pickle.dumps(content, protocol=2))
    for name in ("zip.pth", "bare.pth"):
        with pytest.raises(UserError, match=name):
            read_weights(tmp_path / name)
        assert not trace.exists()
    pickle.loads((tmp_path / "bare.pth").read_bytes())
    assert trace.is_dir()  # it would have gone off


def test_weights_are_loaded_once_at_any_stage_and_never_over_a_checkpoint(tmp_path):
    path, checkpoint = tmp_path / "start.pth", tmp_path / "trained.ckpt"
    start = module().model.state_dict()
    torch.save(start, path)
    for verb in ("validate", "predict"):
        net = module(weights=str(path))
        getattr(trainer(), verb)(net, loader())
        assert same(net.model.state_dict(), start), verb

    trained = module(weights=str(path), lr=0.1, warmup_epochs=0)
    train(trained, checkpoint)
    trainer().validate(trained, loader())
    loaded = cait.CaiTModule.load_from_checkpoint(checkpoint)
    trainer().validate(loaded, loader())
    scored = module(weights=str(path))
    trainer().validate(scored, loader(), ckpt_path=checkpoint)
    expected = read_weights(checkpoint)[0]
    assert not torch.equal(expected["head.weight"], start["head.weight"])
    for net in (trained, loaded, scored):
        assert same(net.model.state_dict(), expected)


@pytest.mark.parametrize("ema", [False, True])
@over_table(__file__, "heads")
def test_the_head_is_kept_for_the_same_classes_alone(classes, rows, ema, tmp_path):
    raw, average = small_network().state_dict(), small_network().state_dict()
    checkpoint = {
        "pytorch-lightning_version": "2.6.6",
        "state_dict": behind("model.", raw),
        "callbacks": {"EMA": average},
        "ImageNetDataModule": {"class_names": [*"abcd"], "depends_on": {}},
    }
    torch.save(checkpoint, tmp_path / "x.ckpt")
    network = small_network(len(classes or "abcd"))
    expected = dict(average if ema else raw)
    for name in ("head.weight", "head.bias"):
        anew = network.state_dict()[name].clone()
        expected[name] = anew if rows is None else expected[name][rows]
    notes = load_weights(network, tmp_path / "x.ckpt", ema, classes)
    assert len(notes) == (rows is None)
    assert same(network.state_dict(), expected)


def test_a_run_is_resumed_and_scored_without_the_file_that_it_started_from(trained, cait, tmp_path):
    path = tmp_path / "start.ckpt"
    shutil.copy(trained / "checkpoints/last.ckpt", path)
    words = ["--trainer.max_steps=1", "--data.num_workers=0", "--run_name=b"]
    assert cait("fit", *SMALL, TWO_BLOCKS, f"--model.weights={path}", *words).returncode == 0
    path.unlink()
    assert cait("resume", "b", "--trainer.max_steps=2").returncode == 0
    assert cait("eval", "b").returncode == 0
