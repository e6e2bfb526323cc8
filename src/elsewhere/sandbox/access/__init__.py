"""Files of a sandbox, read and written from outside while it may be hostile and at work."""
