from tests.driver.hostless_cluster import clusters_folder, start_hostless

__all__ = ["clusters_folder", "start_hostless"]
