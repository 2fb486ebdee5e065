"""Live networks of any library, read as they are: their parts, tables, blocks and scales."""
