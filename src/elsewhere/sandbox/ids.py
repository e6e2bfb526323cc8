"""The range of ids that sandboxes of root live in: root inside is nobody outside."""

__all__ = ["FIRST_ID", "ID_COUNT"]

# All sandboxes of root map to this one range, so that layers can be shared without rewriting owners. It holds every id below
# 2^30 less a million; the million above it gives each sandbox a creator of its own (see `sealing.py`).
FIRST_ID = 1 << 30
ID_COUNT = (1 << 30) - (1 << 20)
