"""What every other room uses and that knows nothing of models or attacks."""
