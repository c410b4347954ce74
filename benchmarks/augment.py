"""RandAugment of a batch on the GPU: `--data.augment_on device` beside torchvision's on the same batch.

    python benchmarks/augment.py [--batch 128] [--img_size 224] [--rounds 50] [--out FILE]

torchvision's RandAugment draws one operation for a whole batch, so it is called on each image, as in its recipe, and
once on the batch, which is less work. It needs torch, timm, lightning and a GPU; TRITON_INTERPRET=1 runs it elsewhere.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from report import DEVICE, add, median_ms
from torchvision.transforms import v2

from cait.data.dataset import seed_generators
from cait.data.transforms import Augmentation, Preprocessing
from cait.extras.fast_input.decode import DecodedImage
from cait.extras.fast_input.kernel import augment
from cait.extras.fast_input.on_device import AugmentOnDevice


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--img_size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--out", type=Path, help="Markdown file to add the results to")
    given = parser.parse_args()
    pipeline = AugmentOnDevice("pillow", Preprocessing(img_size=given.img_size), Augmentation())
    noise = np.random.default_rng(0).integers(0, 256, (2 * given.img_size, 2 * given.img_size, 3), np.uint8)
    drawn = []
    for seed in range(given.batch):
        seed_generators(seed)
        drawn.append(pipeline(DecodedImage(noise)))
    images = torch.stack([pixels for pixels, _, _ in drawn]).to(DEVICE)
    steps = torch.from_numpy(np.stack([noted for _, _, noted in drawn])).to(DEVICE)
    policy = v2.RandAugment(magnitude=9, interpolation=v2.InterpolationMode.BILINEAR)
    planes = images.permute(0, 3, 1, 2).contiguous()
    sides = {
        "ours": lambda: augment(images, steps, *pipeline.fill_color),
        "torchvision, image by image": lambda: [policy(image) for image in planes],
        "torchvision, one draw for the batch": lambda: policy(planes),
    }
    for name, call in sides.items():
        line = f"{given.batch} images of {given.img_size} pixels, {name}: {median_ms(call, given.rounds):.3f} ms"
        print(line, flush=True)
        add(given.out, line)


if __name__ == "__main__":
    main()
