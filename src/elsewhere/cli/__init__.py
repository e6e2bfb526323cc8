"""The command line. `client` is all that a hot verb loads; the rest is loaded once, in the launcher."""
