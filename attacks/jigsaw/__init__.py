"""Puts patches of unknown order back where their borders fit."""
