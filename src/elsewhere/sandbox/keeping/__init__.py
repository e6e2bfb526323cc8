"""A keeper, pid 1 of a sandbox, and everything that is said to it: the line, commands, the wire below them."""
