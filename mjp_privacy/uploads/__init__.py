"""Uploads: what clients sent, and what they give away.

record.py     Upload: its header and files, read and written, with its private images
folder.py     folders of uploads: series of the same images, lines of a table, what is wrong
reading.py    networks, gradients, labels and pictures as users hold them -> tensors
memory.py     uploads as the updates that attacks read; save_upload
checks.py     what pictures show without truth: misfit, order of patches
normalisation.py   whether pixels were normalised as declared
attacking.py  attack_gradients; leak.py   what it returns
check.py, commands.py   mjp check
"""
