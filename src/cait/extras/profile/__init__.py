"""What the steps of a run spend their time on: configs/trainer/profile.yaml."""

MOVED = {"cait.callbacks.profiler": "cait.extras.profile.profiler"}
