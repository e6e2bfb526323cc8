"""Experiments: several approaches from one base, verified, scored and ranked. Knows how they are asked for, written down, counted
and ranked; nothing here runs anything (see `operations/racing/`)."""
