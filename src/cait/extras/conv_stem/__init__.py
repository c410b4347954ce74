"""A convolutional stem in place of the patch projection: --model.fields.stem conv. It is not the CaiT paper's."""

STEMS = {"conv": "cait.extras.conv_stem.stem:ConvStem"}
