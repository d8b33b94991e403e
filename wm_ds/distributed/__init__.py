"""Ranks, devices and backends: nothing outside this room chooses a device."""
