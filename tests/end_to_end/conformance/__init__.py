"""The same answer as one engine: what is asked (``rows_*``), who is asked (``conftest``), and what
counts as equal (``compare``).
"""
