"""Processes, files, ports and interfaces of this machine. Imports nothing else of nbelastic but its errors."""
