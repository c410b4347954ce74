"""What code for timm's networks calls on one, for CaiT: `forward_intermediates`, `reset_classifier`, `feature_info`."""

GROUPS = {"network": "cait.extras.timm_calls.calls:TimmCalls"}
