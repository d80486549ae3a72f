"""The cluster in virtual time: the real core, legs and transfer books; modelled engines, memory and
network.
"""
