"""A grid of cells, attacked block by block and stored."""
