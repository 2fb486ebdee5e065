"""Patches of unknown order put back where their borders fit."""
