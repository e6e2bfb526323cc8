"""Trees and what differs between them. Knows no sandbox: it is given directories and says what changed."""
