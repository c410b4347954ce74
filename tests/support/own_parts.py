"""One's own parts, as a user writes them in a file beside logs/. test_extend.py names them in YAML."""

import numpy as np
import torch
from PIL import Image
from torch import nn
from torchmetrics.classification import MulticlassF1Score


class Net(nn.Module):
    def __init__(self, img_size, num_classes, width=16):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten()
        )
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width * ((img_size - 1) // 2) ** 2, num_classes)

    def forward(self, images):
        return self.head(self.dropout(self.body(images)))


class Digits(torch.utils.data.Dataset):
    """scikit-learn's digits, from memory."""

    classes = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

    def __init__(self, split):
        from sklearn.datasets import load_digits

        digits = load_digits()
        part = slice(None, 1200) if split == "train" else slice(1200, None)
        self.images, self.labels = digits.images[part], digits.target[part]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return Image.fromarray((self.images[index] * 15).astype(np.uint8)), int(self.labels[index])


def noisy(image):
    noise = np.random.randint(0, 30, (*image.size[::-1], 3), dtype=np.uint8)
    return Image.fromarray(np.maximum(np.asarray(image), noise))


def macro_f1(num_classes):
    return MulticlassF1Score(num_classes, average="macro")


class Failing(nn.Module):
    def __init__(self, img_size, num_classes):
        raise RuntimeError("no such luck")
