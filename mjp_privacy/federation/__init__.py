"""Clients: what leaves the device of somebody who trains on private images."""
