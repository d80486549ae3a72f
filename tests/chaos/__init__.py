"""Chaos on real processes: a cluster under load, faults at random moments, and a verdict on every
request.

``load`` asks and records, ``faults`` breaks things by a seed, ``relay`` is the network between the
processes, ``cluster`` knows which process is whose, ``verdict`` (pure) judges, ``run`` is the
command. ``cache_stores`` and ``cache_faults`` are the shared cache and what goes wrong with it.
"""
