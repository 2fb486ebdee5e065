"""Helpers for every other package: errors, names, files, seeds, progress. No models or attacks."""
