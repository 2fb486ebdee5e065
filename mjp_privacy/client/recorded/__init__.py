"""Uploads as files: written, read, checked, and grouped into the lines of a table."""
