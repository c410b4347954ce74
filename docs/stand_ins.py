"""Small files and folders under the names that pages give to a reader's own, made where the checks run.

Commands of a block with the word `small` run on them as they are typed, with two images a batch.
"""

from collections.abc import Iterator
from pathlib import Path

CUT = (
    "--data.batch_size 2 --data.eval_batch_size 2 --data.num_workers 0 --data.global_batch false "
    "--data.repeats 1 --data.img_size 64 --trainer.limit_train_batches 2 --trainer.limit_val_batches 2 "
    "--trainer.accelerator cpu --trainer.devices 1 --trainer.precision 32-true"
)
"""Options of a command on what stands in for a large data set."""
WEIGHTS = {
    "FILE": "xxs24",
    "checkpoint.pth": "xxs24",
    "XXS24_224.pth": "xxs24",
    "lite0.pth": "timm/tf_efficientnet_lite0",
}
"""Files of weights, which nobody has trained, and their networks."""
FOLDERS = ("DIR", "my_photos", "my_frames")
CLASSES = ("cat", "dog", "owl")


def pictures() -> Iterator[object]:
    """Parts of scikit-learn's two photographs, each another."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    number = 0
    while True:
        left = 7 * number % 500
        yield photographs[number % 2].crop((left, number, left + 96, number + 80))
        number += 1


def make_all(folder: Path) -> None:
    """Make what pages call DIR, my_photos, my_frames and photo.jpg, and the files of weights."""
    import torch

    from cait.model.network import create_model

    source = pictures()
    places = {
        f"DIR/{split}/{name}/{number}.jpg": None
        for split in ("train", "val")
        for name in CLASSES
        for number in range(4)
    }
    places |= {f"my_photos/{name}/{number}.jpg": None for name in CLASSES for number in range(12)}
    places |= {
        f"my_frames/{name}/scene{scene}_{number:03}.png": None
        for name in CLASSES
        for scene in range(6)
        for number in range(3)
    }
    for place in (*places, "photo.jpg"):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        next(source).save(folder / place)  # type: ignore[attr-defined]
    for name, network in WEIGHTS.items():
        made = create_model(network)
        torch.save({"model": made.state_dict(), "model_ema": made.state_dict()}, folder / name)
