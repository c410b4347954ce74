"""Parts for few people: a folder each, found in a clone as the extras are, and beside them what several need.

They import cait, and cait none of them. Elsewhere `cait-lightning-contrib` installs them, see pyproject.toml.
"""
