"""What a client does to its upload so that it tells less."""
