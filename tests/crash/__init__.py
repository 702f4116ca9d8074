"""Processes killed and frozen, servers stopped, disks full: what must hold all the same."""
