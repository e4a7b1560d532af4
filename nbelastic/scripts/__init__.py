"""What runs beside torch's elastic agent: the rendezvous that asks the driver, and scripts started by a fork."""
