"""The tables of a report: as figures, as text, and one file for each kind."""
