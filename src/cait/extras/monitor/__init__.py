"""Measure every layer while a run trains: activations, gradients, LayerScale."""

CALLBACK_SETTINGS = {"monitor": "cait.extras.monitor.callback:Monitor"}
MOVED = {"cait.callbacks.monitor": "cait.extras.monitor.callback"}
