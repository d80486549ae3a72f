"""Faults that users of systems like this one have reported in public, each as a test of its kind.

The number in a test's docstring is the fault's entry in ``index.py``, the words behind it its
public source.
"""
