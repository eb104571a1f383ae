"""Plans in the forms that other tools read."""
