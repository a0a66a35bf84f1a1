"""What an answer's text means: the seam between plain text and what a dialect shows."""
