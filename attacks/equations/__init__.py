"""What an upload says of its pictures, as linear equations."""
