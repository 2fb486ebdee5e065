"""Colours of lines in every picture, told apart by most colour-blind readers (Okabe and Ito)."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


def colour(number: int) -> str:
    """Of the line with this number from 0; after the last one they begin again."""
    return COLOURS[number % len(COLOURS)]
