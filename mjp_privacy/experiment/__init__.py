"""An experiment: every cell of a grid, attacked block by block and stored in a run folder.

A cell is one line of a table: a model, a setting, a precision and an attack. A block is a fixed
slice of the images. One image in one cell is a unit. CONTRIBUTING.md has the files in the order of
the work.
"""
