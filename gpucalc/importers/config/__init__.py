"""What a config.json says, a file for each question it answers."""
