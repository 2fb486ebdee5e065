"""Stored tensors as pictures: on the card's strip, and as files that can be scored."""
