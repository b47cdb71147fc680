"""Search for schedules on the card: candidates, and beam search."""
