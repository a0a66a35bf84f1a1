"""The supported grammar packages, one file each."""
