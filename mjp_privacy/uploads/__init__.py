"""Uploads: what clients sent, and what they give away.

header.py, truth.py   the facts of one upload, and its private images, as files have them
record.py     Upload: of files or in memory, loaded and saved; several stacked for an attacker
folder.py     folders of uploads: series of the same images, lines of a table
faults.py     why an upload of a folder cannot be attacked
reading.py    networks, gradients, labels and pictures as users hold them -> tensors
memory.py     a user's own step as uploads; save_upload
checks.py     what pictures show without truth: normalisation, misfit, order of patches
leak/         attack_gradients and what it returns
check.py, commands.py   mjp check
"""
