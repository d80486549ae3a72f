"""What several test modules use; on the path as ``support``."""
