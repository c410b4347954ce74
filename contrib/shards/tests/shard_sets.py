"""Shards, and runs' images of them."""

from cait.cli import main
from cait.data.datamodule import ImageNetDataModule


def make(root, shards, *options):
    """Pack a data set, in this process unless `--workers` says otherwise."""
    main(["shards", str(root), str(shards), "--workers=0", *options])
    return shards


def module(root, **settings):
    defaults = dict(img_size=32, batch_size=4, num_workers=0, repeats=1, max_bad_share=0.2)
    data = ImageNetDataModule(str(root), **(defaults | settings))
    data.setup("fit")
    return data


def batches(data):
    """All that a run sees in an epoch."""
    seen = [*data.train_dataloader(), *data.val_dataloader()]
    assert len(seen) > 2
    return seen
