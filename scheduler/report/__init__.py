"""Plans for people: tables and pictures."""
