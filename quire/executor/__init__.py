"""The wire to the workers: one set of verbs, several ways to reach a device."""
