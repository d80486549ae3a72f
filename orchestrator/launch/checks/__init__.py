"""What ``up`` refuses and ``doctor`` explains, one module per thing that is looked at; ``table``
lists all checks by name.
"""
