"""Engines do a run's tasks in other processes, here or elsewhere; which one is an option."""
