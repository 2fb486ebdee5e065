"""An experiment: every cell of a grid, attacked block by block and stored in a run folder.

A cell is one line of a table: a model, a setting, a precision and an attack. A block is a fixed
slice of the images. One image in one cell is a unit. The files in the order of the work:

    commands    the command line, `mjp attack`
    config      the experiment as YAML states it; overrides: what the command line changes in it
    run         from an experiment and images, or recorded uploads, to a finished run folder;
                run_folder: which one that is, and whether it may be; and how it ended
    plan        which cells there are, on which blocks; what will not apply
    refusals    why an attack does not apply
    work        what is finished; opens models, reads blocks, has each cell done, writes its rows
    cell        one cell on one block: observe the uploads, attack, score; diagnostics: what
                stands beside the scores
    store       the run folder; block_file: one of its files

`source` is the contract for where uploads come from: `simulated` computes them from images,
`recorded` reads them from files. `cell_facts` names a cell and describes it, `code` says which
code made a row. By default the work is done by processes of their own: `engines`.
"""
