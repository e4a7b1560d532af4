"""The process of the driver, which owns a cluster: discovery, agents, jobs and the event log. It runs no user code."""
