"""Processes, files, ports and network interfaces of this machine. Of nbelastic it imports only the errors."""
