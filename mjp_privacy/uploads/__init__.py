"""Uploads as files: anybody's federation can be attacked from what it recorded."""
