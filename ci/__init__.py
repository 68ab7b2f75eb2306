"""What runs the suite many times, and reads what those runs put on record."""
