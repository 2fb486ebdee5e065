"""Training ViTs with and without MJP (`trainer`), and measuring them as the paper does."""
