"""Pixels are whole numbers, so a span of patches holds a lattice: finding patches in it."""
