"""An experiment: every cell of a grid, attacked block by block and stored in a run folder.

A cell is one line of a table: a model, a setting, a precision and an attack. A block is a fixed
slice of the images. One image in one cell is a unit. Read the files in the order of the work:

    run      the way in: from a config and images, or recorded uploads, to a finished run folder
    plan     decides which cells there are, with which attacks, on which blocks of images
    work     carries the plan out and hands out results: models opened, blocks read, cells done
    cell     does one cell on one block: observe the uploads, attack, score
    save     writes each result into the run folder, which `store` reads and writes

`source` is the contract for where uploads come from; `simulated` computes them from images,
`recorded` reads them from files.
"""
