"""One client: how it feeds its model, what it computes and what it uploads."""
