"""Which workers hold how much of a prompt's prefix: an index over token ids. Needs the extra `index`."""
