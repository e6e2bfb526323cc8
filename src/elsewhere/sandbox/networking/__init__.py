"""The network service: one process for all of a user's sandboxes, which is their only way out, and the only way in."""
