"""How a stored chunk's layers are coded: one small interface, chosen by name (``registry.py``)."""
