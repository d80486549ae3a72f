"""The shared tiered cache of KV: keys, index, arena, tiers, the server of a host and its clients."""
