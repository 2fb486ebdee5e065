"""The federation's clients and server under Flower's engines."""
