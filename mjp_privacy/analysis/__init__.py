"""What the position embeddings of a model hold, and where its last block looks."""
