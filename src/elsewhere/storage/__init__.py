"""Where things lie on disk: the state directory, the trash, copies. Knows no sandbox's life and no mount namespace."""
