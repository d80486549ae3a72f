"""Lower tiers of the cache: stores of whole chunks, behind one small interface."""
