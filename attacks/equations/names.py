"""Names of the parameters whose gradients attacks read, as the model has them."""

TABLE = "pos_embed"
UNKNOWN = "unk_embed"
PATCH = "patch_embed.proj.weight"
QKV = "blocks.0.attn.qkv.weight"
HEAD = "head.weight"
HEAD_BIAS = "head.bias"
