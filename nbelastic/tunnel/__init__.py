"""The tunnel through ssh: hosts reach the driver and ipyparallel's controller over the ssh connection that started their agent."""
