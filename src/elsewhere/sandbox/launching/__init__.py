"""How sandboxes come about: the launcher, what it keeps in stock, builders and mechanisms; `engine.py` is the way in."""
