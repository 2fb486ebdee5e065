"""Uploads as files: read, checked and put together into lines of a table."""
