"""Published tables: their per-image rows, and the figures that are checked against them."""
