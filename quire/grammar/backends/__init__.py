"""The grammar packages that Quire can use, one file each."""
