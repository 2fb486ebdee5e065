"""A federation: many clients that train one model, and what a curious server keeps of it."""
