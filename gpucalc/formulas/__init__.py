"""Pure arithmetic: one formula per quantity, each with its unit and its source."""
