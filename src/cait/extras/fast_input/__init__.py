"""The fastest input: decode only the crop of an image, augment arrays, hand over batches in shared memory.

Without this folder timm's own transform makes the training images, and batches go from the workers in PyTorch's way.
"""

TRAIN_PIPELINE = "cait.extras.fast_input.augment:Augment"
