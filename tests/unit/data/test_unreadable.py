"""Images that cannot be read: others stand in for them, they are listed, and many of them end a run."""

import os
from pathlib import Path

import pytest
import torch
from modules import images_in, trainer
from same import same

from cait.data.reading import UnreadableImages
from cait.data.source import open_source
from cait.errors import UserError
from cait.guards.nonfinite import UnreadableReport


def test_the_list_takes_any_name(tmp_path):
    names = [os.fsdecode(b"a\xff.jpg"), 'b, "c"\n.jpg', "ö.jpg"]
    for name in names:
        UnreadableImages(tmp_path / "list.csv").note(name, "cut off")
    assert UnreadableImages(tmp_path / "list.csv").read() == dict.fromkeys(names, "cut off")


def test_the_list_begins_anew_when_a_run_goes_on(mixed_root):
    data = images_in(mixed_root)
    data.unreadable_path = mixed_root / "unreadable.csv"
    data.setup("fit")
    UnreadableImages(data.unreadable_path).note("whole again.jpg", "cut off")
    UnreadableReport(data).on_fit_start(trainer(), None)
    assert not data.unreadable_path.exists()


DAMAGED = [b"", bytes(3000), b"<html>404 Not Found</html>", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0"]
"""What lies in the place of pictures."""


def data_of(root, **settings):
    data = images_in(root, img_size=16, batch_size=2, repeats=1, **settings)
    data.unreadable_path = root / "unreadable.csv"
    data.setup("fit")
    return data


def drawn(data):
    """The images of an epoch, each with the number of the one that was asked for."""
    loader = data.train_dataloader()
    batches = [images for images, _ in loader]
    numbers = [index for keys in loader.batch_sampler for _, index, _ in keys]
    return [*zip(numbers, torch.cat(batches), strict=True)]


@pytest.mark.parametrize("backend", ["auto", "timm"])
def test_damaged_images_are_replaced_listed_and_end_the_run_if_they_are_many(
    mixed_root, backend, capfd
):
    whole = drawn(data_of(mixed_root, backend=backend))
    paths = [path for path, _ in open_source(str(mixed_root)).train]
    damaged = [*range(0, 36, 6)]
    first, second, *others = [Path(paths[number]) for number in damaged]
    first.write_bytes(first.read_bytes()[:-200])  # its header is whole
    second.unlink()
    second.symlink_to("/nowhere/gone.jpg")
    for path, content in zip(others, DAMAGED, strict=True):
        path.write_bytes(content)
    data = data_of(mixed_root, backend=backend, max_bad_share=0.2)
    images = drawn(data)
    for (number, before), (_, after) in zip(whole, images, strict=True):
        assert torch.equal(before, after) is (number not in damaged)
    assert {*data.unreadable.read()} == {paths[number] for number in damaged}
    assert data.unreadable.check() == 6
    assert "the run goes on without it" in capfd.readouterr().err
    again = drawn(data_of(mixed_root, backend=backend, max_bad_share=0.2))
    assert same(again, images)  # by the same others
    with pytest.raises(UserError, match="max_bad_share"):
        drawn(data_of(mixed_root, backend=backend, max_bad_share=0.02))
