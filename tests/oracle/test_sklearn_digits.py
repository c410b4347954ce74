"""The embedded data set is scikit-learn's digits."""

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits


def test_each_digit_is_there_once(digits_root):
    digits = load_digits()
    numbers = []
    for path in digits_root.glob("*/*/*.png"):
        number = int(path.stem)
        numbers.append(number)
        assert path.parent.name == str(digits.target[number])
        pixels = np.asarray(Image.open(path)) * (16 / 255)
        assert np.array_equal(np.round(pixels), digits.images[number])
    assert sorted(numbers) == list(range(1797))


def test_a_fifth_of_each_class_validates(digits_root):
    counts = [len(list(folder.iterdir())) for folder in (digits_root / "val").iterdir()]
    assert len(counts) == 10
    assert sum(counts) == 360
    assert {*counts} <= {35, 36, 37}
