"""The parts of tools/crash-test."""
