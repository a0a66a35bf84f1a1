"""What happened: numbers leave the house through this door."""
