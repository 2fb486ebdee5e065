"""What an upload says of its pictures: linear equations, and how to solve them.

The names here are those, in the model, of the parameters whose gradients attacks read.
"""

TABLE = "pos_embed"
PATCH_BIAS = "patch_embed.proj.bias"
SWIN_TABLE = "absolute_pos_embed"  # a row for each patch, none for a class token
UNKNOWN = "unk_embed"
PATCH = "patch_embed.proj.weight"
PATCH_SYSTEM = (TABLE, PATCH)  # the two gradients that make G = A^T X
QKV = "blocks.0.attn.qkv.weight"
HEAD = "head.weight"
HEAD_BIAS = "head.bias"

CERTAIN, OUT_OF_RANGE = "certain", "out_of_range"  # diagnostics
OPEN_LEVELS = "open_levels"  # directions of a picture's patches that levels of 8 bits determine
