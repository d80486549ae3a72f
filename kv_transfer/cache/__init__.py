"""The shared tiered cache of KV: keys, index, arena, tiers, a host's server and its clients."""
