"""The only contact with devices: what is attached, how fast it is, and constants fitted to that."""
