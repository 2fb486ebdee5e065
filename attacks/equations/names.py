"""Names, in the model, of the parameters whose gradients attacks read."""

TABLE = "pos_embed"
UNKNOWN = "unk_embed"
PATCH = "patch_embed.proj.weight"
QKV = "blocks.0.attn.qkv.weight"
HEAD = "head.weight"
HEAD_BIAS = "head.bias"
