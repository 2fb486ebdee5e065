"""One's own model and gradients, attacked from Python without a config or a run folder.

client.py         how the client made what it sent, in a user's words
reading.py        gradients as autograd, an optimiser or a server holds them -> tensors by name
uploads.py        the same as the uploads that an attacker sees
attacking.py      attack_gradients: every attack that applies
batch_notes.py    what to know of attacks on batches
misfit.py         a check of a picture that needs neither truth nor labels
reconstructed.py  what one attack made: pictures, checks, scores
leak.py           what came back from all: the best, the reasons of others, a picture
saving.py         save_upload: the recorded format, which `mjp attack --uploads` takes
"""
