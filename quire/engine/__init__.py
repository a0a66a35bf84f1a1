"""A request's life outside the device: in, loop, out."""
