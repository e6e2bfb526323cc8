"""What is written down about sandboxes and requests, and how it is kept true: records, journals, the registry."""
