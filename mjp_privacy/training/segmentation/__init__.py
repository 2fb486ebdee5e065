"""Semantic segmentation (the paper's Table 9): networks that give every pixel a class."""
