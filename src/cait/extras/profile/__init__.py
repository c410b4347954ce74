"""What the steps of a run spend their time on: `StepProfiler`, which configs/trainer/profile.yaml names."""

MOVED = {"cait.callbacks.profiler": "cait.extras.profile.profiler"}
