"""Bursts against an application whose number of replicas follows the load, or does not."""
