"""Benches of the control side: no device, no model, seconds to run."""
