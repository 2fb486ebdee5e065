"""Line colours for every picture; most colour-blind readers can tell them apart (Okabe and Ito)."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#882255")


def colour(number: int) -> str:
    """The colour of line `number`, counted from 0; after the last colour they start over."""
    return COLOURS[number % len(COLOURS)]
