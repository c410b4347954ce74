"""Subclasses of the module and of the data module, which change nothing."""

import cait


class Module(cait.CaiTModule):
    pass


class Data(cait.ImageNetDataModule):
    pass
