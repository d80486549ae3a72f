"""Models on disk: the prepared ones, the tiny one for tests, and what a YAML's ``model.path``
means.
"""
