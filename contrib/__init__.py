"""Parts for few people: a folder each, found in a clone as the extras are. They import cait, and cait none of them."""
