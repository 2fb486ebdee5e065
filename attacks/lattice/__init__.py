"""Pixels are whole numbers: the lattice that a span of patches holds."""
