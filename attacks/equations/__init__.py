"""Linear equations that an upload holds about its pictures, and how to solve them."""
