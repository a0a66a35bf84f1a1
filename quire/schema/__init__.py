"""The door types: frozen data that two rooms, or two processes, must agree on. No behaviour, no torch."""
