"""Stand-ins for what a router talks to, and a small language for stories about its core."""
