"""What one's own gradients give away: `attack_gradients` and what it returns."""
