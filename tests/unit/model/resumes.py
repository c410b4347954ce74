"""Whether a network's run of two epochs has the same bits if it is resumed after the first."""

import torch
from modules import loader, module, trainer
from same import same

from cait.train.callbacks import EMA, StepSeed


def train(path, settings, epochs, start, count):
    torch.manual_seed(0)
    net = module(**settings, warmup_epochs=0, schedule="constant")
    fit = trainer(max_epochs=epochs, callbacks=[StepSeed(0), EMA(0.9)])
    fit.fit(net, loader(count), ckpt_path=start)
    fit.save_checkpoint(path)
    return torch.load(path, weights_only=True)


def assert_resumes(path, settings, between, count=24):
    """`between` is called before the checkpoint at `path` is resumed."""
    whole = train(path, settings, 2, None, count)
    first = train(path, settings, 1, None, count)
    between()
    resumed = train(path, settings, 2, path, count)
    for part in ("state_dict", "optimizer_states", "callbacks"):
        assert same(resumed[part], whole[part]), part
        assert not same(first[part], whole[part]), part
