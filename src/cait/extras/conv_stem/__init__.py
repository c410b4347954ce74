"""Convolutions in place of the patch projection: --model.fields.stem conv or pooled. They are not the CaiT paper's."""

STEMS = {"conv": "cait.extras.conv_stem.stem:ConvStem", "pooled": "cait.extras.conv_stem.stem:PooledStem"}
"""The stem of "Early Convolutions Help Transformers See Better", Xiao et al., arXiv 2106.14881, and one that pools."""
