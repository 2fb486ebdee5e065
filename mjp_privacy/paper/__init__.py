"""The paper's other tables: robustness, segmentation, other networks, what positions hold."""
