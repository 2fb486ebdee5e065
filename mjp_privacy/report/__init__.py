"""Stored rows become what people look at: tables, pictures, a page."""
