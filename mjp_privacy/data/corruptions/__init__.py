"""The 15 common corruptions of ImageNet-C, at five severities, for pictures of one's own.

After Hendrycks and Dietterich, “Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations” (ICLR 2019), with the constants of the official generator. Written anew over NumPy,
SciPy and Pillow, so no picture equals the official file's: `differences.py` says where they differ.

    pixels = corrupted(pixels, "fog", 3, np.random.default_rng(0))  # (H, W, 3) uint8 to the same
"""
