"""Models on corrupted, hard and strange images: ImageNet-C, -A, -O (the paper's Tables 2, 10)."""
