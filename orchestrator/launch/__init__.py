"""Starts, watches and stops the processes of a cluster; ``local`` does it on this machine."""
