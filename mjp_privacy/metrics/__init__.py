"""How close a reconstruction comes to the private image, and statistics of many."""
