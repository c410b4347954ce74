"""scikit-learn's stratified folds of a table of images, which part no group; and the one that serves best."""

import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy import ndarray
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

from cait.data.table import Images
from cait.errors import UserError


class GroupFolds(StratifiedGroupKFold):
    """The folds of scikit-learn, in a tenth of its time: all folds are weighed at once for a group."""

    def _find_best_fold(self, y_counts_per_fold: Any, y_cnt: Any, group_y_counts: Any) -> int:
        """The fold to which a group goes: the classes are spread most evenly then."""
        folds = len(y_counts_per_fold)
        added = np.eye(folds)[:, :, None] * group_y_counts  # [folds, folds, classes]
        shares = (y_counts_per_fold + added) / y_cnt
        costs = shares.std(axis=1).mean(axis=1).tolist()
        sizes = y_counts_per_fold.sum(axis=1).tolist()
        best = 0
        for fold in range(1, folds):
            # as numpy.isclose
            is_close = abs(costs[fold] - costs[best]) <= 1e-8 + 1e-5 * costs[best]
            if costs[fold] < costs[best] or (is_close and sizes[fold] < sizes[best]):
                best = fold
        return best


def folds_of(images: Images, folds: int, merges_rare: bool, name: str) -> list[ndarray]:
    """The rows of each fold; with `merges_rare` the labels of fewer than `folds` images count as one.

    Raises UserError, which calls the images `name`, if no class, or not the groups, can be divided so.
    """
    if images.groups is not None and (count := len(np.unique(images.groups))) < folds:
        raise UserError(f"{folds} folds need as many groups, {name} has {count}")
    labels = np.asarray(images.labels)
    if merges_rare:
        labels = np.where(np.bincount(labels)[labels] < folds, -1, labels)
    splitter = StratifiedKFold if images.groups is None else GroupFolds
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a class of fewer images than folds is in some of them
            return [
                rows
                for _, rows in splitter(folds, shuffle=True, random_state=0).split(
                    labels, labels, images.groups
                )
            ]
    except ValueError as error:
        raise UserError(
            f"{len(images):,} images cannot be divided into {folds} folds: {error}"
        ) from error


def best_fold(images: Images, fraction: float, has_class: ndarray, name: str) -> ndarray:
    """The rows of the fold that serves best to validate on; `has_class` is bool [labels, classes].

    What counts first is that no class loses more than half of its images, then that each has some to validate on,
    then the share. A class that the fold leaves out gives a group of its own, if that serves better.
    """
    labels = np.asarray(images.labels)
    groups = np.arange(len(images)) if images.groups is None else images.groups

    def count_classes(labels: ndarray) -> ndarray:
        return np.bincount(labels, minlength=len(has_class)) @ has_class

    in_all = count_classes(labels)

    def cost(rows: ndarray) -> tuple[float, ...]:
        counts = count_classes(labels[rows])
        halved = (2 * counts > in_all).sum()
        return (not len(rows), halved, (counts == 0).sum(), abs(len(rows) / len(images) - fraction))

    def with_a_group(rows: ndarray, label_has_class: ndarray) -> Iterable[ndarray]:
        for group in np.unique(groups[label_has_class[labels]]):
            yield np.union1d(rows, np.flatnonzero(groups == group))

    folds = max(2, min(round(1 / fraction), len(np.unique(groups))))  # scikit-learn takes no more
    best: ndarray = min(folds_of(images, folds, True, name), key=cost)
    for column in np.flatnonzero(count_classes(labels[best]) == 0):
        best = min([best, *with_a_group(best, has_class[:, column])], key=cost)
    return best
