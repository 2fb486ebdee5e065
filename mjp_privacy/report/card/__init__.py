"""The privacy card: the answer of a report on its first screen, and what it is made of."""
