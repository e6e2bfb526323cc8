"""Back to reality: a sandbox's changes, planned three-way, applied by a journal, in stages, with an undo."""
