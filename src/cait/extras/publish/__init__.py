"""Share a run: its network for timm, the Hugging Face Hub, torch.export, ONNX or OpenVINO, and its model card."""

from cait.plugins import Verb

VERBS = {
    "card": Verb(
        "cait.extras.publish.card:card",
        "write a run's model card for the Hugging Face Hub: cait card NAME\n[OWNER/NAME], which adds timm's files",
    ),
    "export": Verb(
        "cait.extras.publish.exporting:export_run",
        "write a run's network for other programs: cait export NAME\n"
        "[--format timm|torch_export|onnx|openvino] [--int8] [--output PATH]",
    ),
}
GROUPS = {"network": "cait.extras.publish.timm_calls:TimmCalls"}
SHARED_FIELDS = (
    *(
        "img_size",
        "patch_size",
        "in_chans",
        "num_classes",
        "embed_dim",
        "depth",
        "depth_token_only",
        "num_heads",
    ),
    *("mlp_ratio", "qkv_bias"),
)
"""The fields that timm's CaiT has too, under the same names. In all other fields timm's CaiT is the paper's."""
