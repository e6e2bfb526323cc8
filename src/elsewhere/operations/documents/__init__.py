"""Documents: the one JSON that each verb prints with --json."""
