"""Drawings of the report as inline SVG, made by our own small code: nothing heavy is imported."""
