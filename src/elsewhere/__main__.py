"""`python -m elsewhere`, the same as the command."""

from elsewhere.cli.client import main

raise SystemExit(main())
