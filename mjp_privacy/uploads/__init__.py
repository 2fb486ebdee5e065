"""Uploads that somebody else recorded: what is wrong with them, and what they give away."""
